"""Bounds and costs in closed form."""

from fl_privacy.theory.distribution import distribution_time

__all__ = ["distribution_time"]
