"""Reductions that are one kernel on a GPU, and stay in cache on the CPU."""
