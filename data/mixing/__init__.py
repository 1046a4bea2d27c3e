"""Several sources in given shares: the source of each sample, and the index of the sample within that source."""
