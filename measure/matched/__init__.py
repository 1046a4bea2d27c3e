"""What the null ``matched`` reads of a model."""
