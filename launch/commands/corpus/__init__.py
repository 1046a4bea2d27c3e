"""Commands about the data that a run reads."""
