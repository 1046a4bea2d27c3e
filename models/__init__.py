"""The decoder: one configurable model, its parts, and its birth."""
