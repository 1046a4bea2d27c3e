"""Weights of a model that the null ``matched`` reads."""
