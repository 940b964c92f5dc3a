"""`encode: {kind: rns}`: integers as residues modulo several small numbers (Athanasiou et al. 2026, Algorithm 1)."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from fl_privacy.errors import FederationError
from fl_privacy.rns import moduli as choose, residues
from fl_privacy.rns.integers import Integers
from fl_privacy.rns.moduli import Moduli
from fl_privacy.rns.residues import Residues
from fl_privacy.steps.encode.modular import Encoding


def moduli(n: int, r: int) -> Moduli:
    """The best moduli for sums of n integers of r digits."""
    return choose.optimal(choose.least(n, r))


def encode(values: ArrayLike, moduli: Moduli, r: int) -> Residues:
    """Residues, [moduli, values], of values in (-1, 1) with r decimal digits (Algorithm 1)."""
    given = np.asarray(values, np.float64).reshape(-1)
    if not (np.abs(given) < 1).all():
        raise FederationError("values: one is not in (-1, 1); divide them by their range first")
    residues.check_moduli(moduli)
    # Below 1, a float64 times 10^r may round up to 10^r.
    top = Integers.decimal(r).largest
    return residues.of(np.clip(np.trunc(given * 10.0**r).astype(np.int64), -top, top), moduli)


def decode(sums: ArrayLike, moduli: Moduli, r: int, n: int) -> NDArray[np.float64]:
    """The mean of n updates from the sums of their residues, reduced or not."""
    residues.check_moduli(moduli)
    given = np.asarray(sums)
    if given.ndim != 2 or given.dtype.kind not in "iu" or len(given) != len(moduli) or bool((given < 0).any()):
        raise FederationError("sums: not a row of whole numbers from 0 for each modulus")
    if math.prod(moduli) < choose.least(n, r):
        raise FederationError(f"moduli: their product is too small for sums of {n} values of {r} digits")
    residues.check_terms(given.astype(np.uint64), moduli, n)
    integers = residues.decode(given.astype(np.uint64), moduli)
    residues.check_sum(float(np.abs(integers).max(initial=0)), n * Integers.decimal(r).largest)
    return np.asarray(integers.astype(np.float64) / 10.0**r / n)


class Rns(Encoding):
    """Residue numbers: each residue is summed apart, and the sums decode to that of the updates."""

    kind: Literal["rns"] = "rns"
    moduli: Literal["optimal", "primes"] = Field(
        "optimal", description="pairwise coprime with the smallest sum, or the first primes, as published"
    )
    form: Literal["published", "carry-safe"] = Field(
        "carry-safe", description="what is released: sums of residues, which leak, or these modulo each modulus"
    )

    @property
    def released(self) -> str:
        return self.form

    def moduli_for(self, least: int) -> Moduli:
        return choose.primes(least) if self.moduli == "primes" else choose.optimal(least)
