"""Callbacks: observation, snapshots, records, loggers, progress."""
