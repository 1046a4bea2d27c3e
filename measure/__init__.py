"""The instrument: one pass over a probe, what observes it, what it comes to, and where that is recorded."""
