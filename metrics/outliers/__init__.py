"""Outliers of activations, which decide the cost of low-bit arithmetic."""
