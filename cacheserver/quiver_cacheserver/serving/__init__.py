"""What the daemon serves, and on which connections."""
