"""Pictures: arrays in, matplotlib figures out."""
