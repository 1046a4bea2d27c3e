"""Models of the Python index, from file to finding."""
