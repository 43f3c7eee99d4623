"""What the host decides for Hopper: tiles and schedules."""
