"""The mathematics of the mixes: additive shares, the check of their sums, evidence, and onions."""
