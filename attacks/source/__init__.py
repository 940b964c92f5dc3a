"""Whose record is this? Source inference, also on what a shuffle or a sum left of the updates."""
