"""What is measured and shown: metrics, sentinels, plots, scores, tables, models behind an API."""
