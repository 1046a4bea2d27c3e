"""Export of a model with its modelling code, for ``transformers`` without this package (docs/exchange.md)."""
