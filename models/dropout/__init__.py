"""Dropout: its config, and masks that are a pure function of their place."""
