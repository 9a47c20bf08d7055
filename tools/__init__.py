"""Setup of the virtual environment."""
