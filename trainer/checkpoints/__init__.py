"""Checkpoints: their format, how they are written beside training, how they are loaded."""
