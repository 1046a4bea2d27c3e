"""Commands on what a run reads."""
