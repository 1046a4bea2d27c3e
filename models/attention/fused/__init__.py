"""Fused attention: the operators of each device, a CPU kernel of this project, blocks of queries on a CPU, and the
choice between them.
"""
