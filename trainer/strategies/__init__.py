"""Distribution of a run over processes."""
