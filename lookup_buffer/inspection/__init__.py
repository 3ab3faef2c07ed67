"""Read a fleet through its store: what the commands and the dashboard have in common."""
