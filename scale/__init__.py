"""From one core to many GPUs."""
