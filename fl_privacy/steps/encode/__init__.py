"""Encodings of updates as integers, for routes on which only sums are released."""
