"""Certificates: what a run commits to before it shows it, and the check of a checkpoint against that."""
