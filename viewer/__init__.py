"""What replay.py reads, draws and serves: sources of trajectories, a page, live play, an export."""
