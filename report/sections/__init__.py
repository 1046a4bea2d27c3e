"""Sections of pages, one file per link of the causal chain."""
