"""Sections of what training itself logs: they are in the page of runs alone."""
