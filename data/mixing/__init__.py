"""Several sources in asked shares: which one gives a sample, and its how manieth."""
