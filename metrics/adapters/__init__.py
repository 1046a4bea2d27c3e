"""What adapters do to a model (definitions §12)."""
