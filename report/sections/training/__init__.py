"""Sections about training itself, from its logs: they are in the page of runs alone."""
