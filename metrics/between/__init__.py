"""What is measured between models: pure functions, tensors in, numbers out."""
