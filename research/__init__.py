"""Studies of real, trained models by the project itself, and what they gave; not in the wheel."""
