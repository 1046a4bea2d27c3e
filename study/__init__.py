"""Studies: many runs, one question."""
