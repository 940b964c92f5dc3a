"""Models as files: those that a site received, files to export to, and the one that a federation starts from."""

from fl_privacy.models.kept import Kept, Which, keep, received

__all__ = ["Kept", "Which", "keep", "received"]
