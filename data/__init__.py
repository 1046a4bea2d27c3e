"""Where tokens come from: corpora, tokenizers, shards, batches, probes."""
