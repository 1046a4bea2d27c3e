"""Lists of features of single sequences, with text, for readers."""
