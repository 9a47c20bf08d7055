"""Reporting: metrics, sentinels, plots, scores, trackers and the benchmark table."""
