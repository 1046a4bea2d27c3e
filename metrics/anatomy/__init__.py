"""What a sink is made of: norms of keys and values, entropy and logits of heads, sinks of single sequences."""
