"""Construction of token shards, piece by piece, by several processes, so that a killed build resumes."""
