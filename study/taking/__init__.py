"""Who runs a trial, and what went wrong with it: what processes that share a study tell one another on disk."""
