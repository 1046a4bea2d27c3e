"""Audit: check that the checkpoints of a suite are what their names say."""
