"""Robustness: tests if a changed model is still kin of its original, and a stranger of all others."""
