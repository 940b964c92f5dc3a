"""What a server finds out about the secret orders of Tazza."""
