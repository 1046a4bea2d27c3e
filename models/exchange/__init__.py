"""Checkpoints of ``transformers``, read and written."""
