"""The gradient of the loss by what flows through a model, from a pass of its own that leaves training alone."""
