"""Samples changed on purpose, for studies of the effect of data."""
