"""How token shards come about: piece by piece, by several processes, so that a killed build goes on where it was."""
