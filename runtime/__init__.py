"""What makes a run work anywhere and survive: processes, samplers elsewhere, files, signals.

To understand multi-turn RL nobody needs to read these; the files at the root use them.
"""
