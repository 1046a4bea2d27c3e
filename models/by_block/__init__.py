"""Decoder with one block at a time in memory."""
