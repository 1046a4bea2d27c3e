"""Birthmark: pretrain transformers and see the mark that their random initialisation left on them."""

__version__ = "0.1.0"
