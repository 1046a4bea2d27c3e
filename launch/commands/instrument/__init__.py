"""Commands that measure models of any kind."""
