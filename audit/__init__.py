"""Whether the checkpoints of a suite are what they say they are."""
