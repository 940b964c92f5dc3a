"""Additions to fl-privacy, as docs/extending.md builds them."""
