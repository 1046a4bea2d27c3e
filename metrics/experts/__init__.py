"""What each expert of a mixture does."""
