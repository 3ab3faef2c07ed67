"""What commands and the dashboard ask a fleet."""
