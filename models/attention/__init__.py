"""Attention, built from the parts that the config chooses."""
