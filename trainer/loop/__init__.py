"""What happens around every optimizer step: steps that are skipped, batches read ahead, times, traces."""
