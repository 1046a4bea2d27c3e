"""Corpora of existing tokens: files of other frameworks and this project's shards, mapped into memory unchanged."""
