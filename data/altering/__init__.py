"""Samples changed on purpose, for studies of what the data do."""
