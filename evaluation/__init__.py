"""Evaluation of a model beyond its loss: bits per byte of texts and scores of tasks, during training."""
