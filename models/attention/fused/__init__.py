"""Fused attention: the operators of each device, blocks of queries on a CPU, and the choice between them."""
