"""What people give by a name: models, and the config files that the package brings."""
