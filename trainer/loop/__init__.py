"""Work around every optimizer step: skipped steps, batches read ahead, times, traces."""
