"""Experiments. Each is one command and has a committed result; see README.md."""
