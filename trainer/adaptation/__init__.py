"""Runs that train an adapter: their checkpoints hold that alone, and are loaded on top of what the run started from."""
