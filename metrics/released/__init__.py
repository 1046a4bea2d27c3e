"""Quantities of [SO] as its authors released them, where they differ from the definitions (definitions §18)."""
