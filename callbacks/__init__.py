"""When it is measured and where it goes: observation, snapshots, records, loggers, progress."""
