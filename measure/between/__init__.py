"""Comparison of several models: one pass of each, then every pair from the stored results."""
