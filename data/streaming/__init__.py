"""Streamed sets, never whole on the disk: read file by file, tokenised ahead, resumed to the token."""
