"""WebArena: do tasks on web sites in a real browser. The environment is in env.py."""
