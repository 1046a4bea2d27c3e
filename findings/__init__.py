"""What the numbers of a run say, in sentences, and how they decide."""
