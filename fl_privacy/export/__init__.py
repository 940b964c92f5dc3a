"""Giving a run's model to its user: where it is, in which format, and a card that says where it comes from."""
