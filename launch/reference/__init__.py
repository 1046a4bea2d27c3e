"""Pages of the documentation, generated from the code."""
