"""Who is connected to whom, and how far each site's position gives it away."""

from fl_privacy.topology.graphs import KINDS, build

__all__ = ["KINDS", "build"]
