"""Evaluation as counts that can be added: what a site counts, what all counts together say of a model."""
