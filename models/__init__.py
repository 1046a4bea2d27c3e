"""What is trained: one configurable decoder, its parts, and how it is born."""
