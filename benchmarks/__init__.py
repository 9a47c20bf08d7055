"""Speed measurements, each against a baseline that does the same work: README.md."""
