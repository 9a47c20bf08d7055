"""Speed measurements, each compared with a baseline that does the same work; see README.md."""
