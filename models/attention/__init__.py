"""One attention, from the parts that config chooses."""
