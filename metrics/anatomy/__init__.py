"""Parts of a sink: norms of keys and values, entropy and logits of heads, sinks of single sequences."""
