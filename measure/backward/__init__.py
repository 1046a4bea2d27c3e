"""Gradients of the loss by activations, from a separate pass that leaves training untouched."""
