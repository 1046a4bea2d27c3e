"""Outliers of activations, which decide what low-bit arithmetic costs."""
