"""Studies of seeds: every init crossed with every order of the data, and whose doing the differences are."""
