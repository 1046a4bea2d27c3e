"""The lineage test of two models whose channels do not stand in the same order or in the same basis."""
