"""Tazza's poisoning defence: models that answer alike are combined with each other, and with no others."""
