"""What people do to a model's weights after it was trained: pure functions, one file per idea, one table."""
