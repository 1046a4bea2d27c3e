"""How sequences are cut from a corpus: where documents begin, which share a sequence, where BOS stands."""
