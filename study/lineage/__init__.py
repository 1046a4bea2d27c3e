"""Studies of lineage: tests for a common birth of models."""
