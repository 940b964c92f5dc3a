"""Bounds and costs in closed form."""

from fl_privacy.rns.meter import leak as rns_leak
from fl_privacy.theory.distribution import distribution_time

__all__ = ["distribution_time", "rns_leak"]
