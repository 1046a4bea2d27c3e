"""Studies of lineage: which models share a birth."""
