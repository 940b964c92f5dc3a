"""A number that an attack reached, and the number that knowing nothing would reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measure:
    """A value, what chance gives, and the value for groups of updates (by the true budget of their site, say)."""

    value: float
    chance: float
    groups: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """All measures of an attack by name; curves: y by x, as in `{"0.5": 0.1, "8": 0.4}`; and PNG files by name."""

    measures: Mapping[str, Measure]
    curves: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what was not measured, and why
