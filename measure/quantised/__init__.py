"""Cost of low-bit arithmetic for a model, simulated in its own precision (definitions §14)."""
