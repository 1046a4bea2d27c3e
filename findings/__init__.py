"""Findings: verdicts on the numbers of a run, in sentences."""
