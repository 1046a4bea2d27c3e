"""Optimizers: the table that configs choose from, their parameter groups, and those that torch lacks."""
