"""Ability of a model to read beyond its training length, and the cost of dropping its first keys."""
