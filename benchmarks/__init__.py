"""What is fast, measured against what does the same work otherwise: README.md."""
