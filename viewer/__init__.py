"""The parts of replay.py: sources of trajectories, a web page, live play, an export."""
