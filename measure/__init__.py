"""The instrument: one pass over a probe, its observers, their results, and the records of these."""
