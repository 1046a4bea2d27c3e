"""Lists of what single sequences show, with text, as people read them."""
