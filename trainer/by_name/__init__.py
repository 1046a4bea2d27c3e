"""Lookup by name: models, and the config files that the package brings."""
