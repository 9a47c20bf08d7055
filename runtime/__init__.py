"""What makes a run work anywhere and survive: processes, samplers elsewhere, files, signals.

Nobody needs these to understand multi-turn RL; the files at the root do, and use them.
"""
