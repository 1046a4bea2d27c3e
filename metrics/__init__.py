"""What is measured: one torchmetrics.Metric or pure function per definition; tensors in, numbers out."""
