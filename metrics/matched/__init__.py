"""Lineage test of two models whose channels differ in order or in basis."""
