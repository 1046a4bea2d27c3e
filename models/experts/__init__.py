"""Mixtures of experts: an MLP that sends each token through a few of many."""
