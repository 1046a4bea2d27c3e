"""Checkpoints: their format, writing beside training, loading."""
