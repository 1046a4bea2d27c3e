"""Dropout: its config, and masks that are a function of who asks."""
