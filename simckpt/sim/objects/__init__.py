"""The kinds of Python objects that the walker knows: how each is captured, matched with a live one, and restored."""
