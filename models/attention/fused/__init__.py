"""Fused attention: the operators of each device, a kernel of our own and blocks of queries on a CPU, and the choice."""
