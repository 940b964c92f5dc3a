"""Who sent which update, from everything in the server's view but the values."""
