"""Experiments, each one command, each with its result: README.md."""
