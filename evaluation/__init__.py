"""How good a model is beyond its loss: bits per byte of texts, scores of tasks, while it trains."""
