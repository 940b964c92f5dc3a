"""Whether what a paper says holds in these runs: differences by seed, with their interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attacks.audit.matrix import Claim, Number
from fl_privacy.report.interval import mean_interval

HOLDS, FAILS, UNCLEAR, MISSING = "holds", "does not hold", "not clear", "not measured"
Values = Mapping[str, float]


def checked(claim: Claim, left: Values, right: Values) -> dict[str, Any]:
    """A claim beside the numbers by seed that it is about."""
    seeds = [seed for seed in left if seed in right]
    differences = [right[seed] - left[seed] for seed in seeds]
    mean, half = mean_interval(differences) if seeds else (None, None)
    return {
        "text": claim.text,
        "left": _told(claim.left, left, seeds),
        "right": _told(claim.right, right, seeds),
        "within": claim.within,
        "seeds": len(seeds),
        "difference": mean,
        "half": half,
        "verdict": MISSING if mean is None else verdict(mean, half, claim.within),
    }


def verdict(mean: float, half: float | None, within: float | None) -> str:
    """By the interval of the mean difference, right less left; of one seed, by its sign alone."""
    low, high = mean - (half or 0.0), mean + (half or 0.0)
    if within is None:
        return HOLDS if low > 0 else FAILS if high <= 0 else UNCLEAR
    if -within <= low and high <= within:
        return HOLDS
    return FAILS if low > within or high < -within else UNCLEAR


def _told(number: Number, values: Values, seeds: list[str]) -> dict[str, Any]:
    mean = mean_interval([values[seed] for seed in seeds])[0] if seeds else None
    return {**number.model_dump(exclude_none=True), "mean": mean}
