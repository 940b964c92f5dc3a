"""Differential privacy of what leaves a site."""
