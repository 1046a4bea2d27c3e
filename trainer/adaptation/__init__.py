"""Runs that train an adapter: their checkpoints hold only the adapter, and are loaded on top of the model that the run
started from.
"""
