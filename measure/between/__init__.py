"""Several models beside one another: one pass of each, then every pair from what the passes left."""
