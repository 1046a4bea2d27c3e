"""Metrics of a backward pass."""
