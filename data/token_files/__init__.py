"""Corpora that are tokens already: files of other frameworks and our own shards, mapped into memory as they are."""
