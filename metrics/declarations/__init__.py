"""Declarations of quantities, one file for each subject; `metrics/quantities.py` has the table of them."""
