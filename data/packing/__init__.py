"""Cutting of sequences from a corpus: beginnings of documents, their packing into sequences, places of BOS."""
