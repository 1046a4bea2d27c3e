"""Measurement of a decoder with one block at a time in memory."""
