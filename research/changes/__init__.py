"""Changes to a trained model's weights: pure functions, one file per idea, one table."""
