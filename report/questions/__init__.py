"""What a person asks of a run, and how the numbers decide the answer."""
