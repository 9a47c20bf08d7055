"""One run from its start to its end, and its files."""
