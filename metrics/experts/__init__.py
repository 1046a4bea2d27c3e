"""Metrics of the single experts of a mixture."""
