"""Birthmark from Python: ``import birthmark as bm`` (docs/python.md)."""
