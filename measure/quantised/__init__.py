"""What low-bit arithmetic would cost a model, simulated in its own precision (definitions §14)."""
