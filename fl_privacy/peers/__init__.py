"""Rounds without a server: what sites send each other, and the models that they make of it. Pure functions."""
