"""A model that leaves with its own modelling code, for ``transformers`` without us (docs/exchange.md)."""
