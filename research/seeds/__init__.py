"""Studies of seeds: every init crossed with every order of the data, with the share of each in the differences."""
