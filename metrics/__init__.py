"""Metrics: one torchmetrics.Metric or pure function per definition; tensors in, numbers out.

States are float64 sums, additive over batches and ranks. Results are numpy arrays: torchmetrics squeezes tensors of one
element, and the shape ``[layers, heads]`` must hold for one layer with one head too.
"""
