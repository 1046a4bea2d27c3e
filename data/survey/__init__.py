"""Survey of a corpus's documents before tokenisation: hash, size and split of each."""
