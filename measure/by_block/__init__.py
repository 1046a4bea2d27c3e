"""The instrument on a decoder of which one block at a time is in memory."""
