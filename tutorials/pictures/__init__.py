"""Pictures of the tutorials; `python -m tutorials.pictures.draw` draws them all."""
