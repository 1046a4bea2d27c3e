"""Effects of adapters on a model (definitions §12)."""
