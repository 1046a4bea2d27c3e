"""Studies of arms: runs that differ from a base in some fields."""
