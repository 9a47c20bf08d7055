"""Tests that take long: real samplers, learning curves, killed runs."""
