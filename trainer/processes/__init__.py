"""The processes of a run: what the launcher says of them, their group, and how they fail together."""
