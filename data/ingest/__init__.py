"""Ingestion: remote, compressed or damaged corpora become files that can be read."""
