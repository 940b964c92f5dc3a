"""Paired comparisons of an audit: one difference per seed and pair of cells, a t-test, and TOST."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from attacks.audit.matrix import Number, Pairs
from attacks.common.paired import equivalence

Values = Callable[[Number], Mapping[str, float]]
LEAST = 2  # pairs that a test needs


def compared(pairs: Pairs, values: Values) -> dict[str, Any]:
    """Both tests over all seeds that both cells of a pair have."""
    differences = list[float]()
    for left, right in zip(pairs.left, pairs.right, strict=True):
        ours, theirs = (values(Number(cell=cell, measure=pairs.measure)) for cell in (left, right))
        differences += [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    found = {"title": pairs.title, "measure": pairs.measure, "margin": pairs.margin, "n": len(differences)}
    tests = asdict(equivalence(differences, pairs.margin)) if len(differences) >= LEAST else {}
    return {**found, **tests, "differences": differences}
