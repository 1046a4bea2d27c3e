"""Fingerprints of models on one bench: each method in a file of its own, from the formula of its paper."""
