"""Sources of tokens: corpora, tokenizers, shards, batches, probes."""
