"""A run from start to end, and the files it writes."""
