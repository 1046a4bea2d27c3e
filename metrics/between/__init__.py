"""Comparisons between models: pure functions, tensors in, numbers out."""
