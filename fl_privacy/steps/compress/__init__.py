"""Compression of what leaves a site."""
