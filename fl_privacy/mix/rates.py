"""The CPU time that shares of an update take on this machine, measured on some of its columns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fl_privacy.crypto import keys
from fl_privacy.mix import check, shares
from fl_privacy.rns import residues
from fl_privacy.rns.moduli import Moduli

SAMPLE = 50_000  # columns; larger updates have compiled loops, and take less than in proportion


class Seconds(NamedTuple):
    """Of one round, at most."""

    site: float  # splitting, and its answers if sums are checked
    mix: float  # expanding the seeds of all sites, or adding up what they sent, whichever takes longer


def seconds(moduli: Moduli, columns: int, mixes: int, sites: int, challenges: int) -> Seconds:
    """For so many columns per update; `challenges` of a check, or 0."""
    count, rng = min(columns, SAMPLE), np.random.default_rng(0)
    kind, scale = residues.width(moduli, 1), columns / min(columns, SAMPLE)
    values = np.stack([rng.integers(0, m, count, dtype=kind) for m in moduli])
    packed, seed = residues.pack(values, moduli), keys.fresh()
    added = _took(lambda: residues.add([packed], moduli, count, reduced=True))
    if mixes == 1:
        return Seconds(0.0, scale * sites * added)
    site = _took(lambda: shares.split(values, moduli, mixes, seed))
    mix = max(added, _took(lambda: shares.expanded([seed], moduli, count)))
    if challenges and count > challenges:
        site += mixes * _took(lambda: check.answers(values, moduli, seed, challenges))
    return Seconds(scale * site, scale * sites * mix)


def _took(call: Callable[[], object]) -> float:
    """The second of two calls: the first one may import and allocate."""
    call()
    began = time.thread_time()
    call()
    return time.thread_time() - began
