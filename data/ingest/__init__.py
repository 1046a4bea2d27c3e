"""On the way to a corpus: what is elsewhere, compressed or damaged becomes files that can be read."""
