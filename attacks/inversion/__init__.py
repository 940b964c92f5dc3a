"""Gradient inversion: the records behind an update of one step, from the coordinates of it that some parties saw."""
