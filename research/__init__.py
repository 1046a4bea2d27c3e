"""Studies of real, trained models by the project itself, with their results; not in the wheel."""
