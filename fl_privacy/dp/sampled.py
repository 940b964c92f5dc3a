"""One round of DP-SGD as a mechanism: its sampling rate, and the smallest noise that keeps it within a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from fl_privacy.dp import gaussian
from fl_privacy.dp.ledger import Charge, compose
from fl_privacy.errors import FederationError

UNIT, ADJACENCY = "record", "add-or-remove"
PRECISION = 1e-3  # relative; the result is never below the smallest valid noise
WIDEN = 1.25
TINY = 1e-12


@dataclass(frozen=True)
class Plan:
    """Sampling rate, steps, expected batch size, clipping bound of a record's gradient, and noise relative to it."""

    rate: float
    steps: int
    batch: float
    clip: float
    noise: float

    @property
    def charge(self) -> Charge:
        """The privacy cost of a round."""
        return Charge(self.noise, UNIT, ADJACENCY, self.rate, self.steps)


@dataclass(frozen=True)
class Private:
    """What makes training private: its plan and a single-use key."""

    plan: Plan
    key: bytes

    @property
    def clean(self) -> Private:
        """The same batches without clipping and noise, to score attacks against."""
        return replace(self, plan=replace(self.plan, clip=math.inf, noise=0.0))


def plan(
    records: int, epochs: int, batch_size: int, clip: float, epsilon: float, delta: float, rounds: int = 1
) -> Plan:
    """The plan of a site with this many records: 1/rate steps per epoch, so a record is expected once per epoch.

    Epsilon is for `rounds` such rounds together.
    1/rate is an integer, so sites of similar size share a plan and the noise is solved once for all of them.
    """
    if records < 1:
        raise FederationError("data: a site has no records to train on; use fewer sites or another partition")
    steps_per_epoch = math.ceil(records / batch_size)
    rate, steps = 1 / steps_per_epoch, epochs * steps_per_epoch
    return Plan(rate, steps, records * rate, clip, noise_multiplier(epsilon, delta, rate, steps * rounds))


@lru_cache(maxsize=4096)
def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Smallest noise, to a thousandth, for which the ledger composes `steps` sampled Gaussians to (epsilon, delta).

    >>> round(noise_multiplier(2.0, 1e-5, 1 / 9, 18), 2)
    1.41
    """
    from scipy.optimize import brentq

    gaussian.check(epsilon, delta)

    def excess(log_noise: float) -> float:
        charge = Charge(math.exp(log_noise), UNIT, ADJACENCY, rate, steps)
        return math.log(max(compose([charge], delta), TINY) / epsilon)

    step = math.log(WIDEN)
    low = high = _first_guess(epsilon, delta, rate, steps)
    while excess(high) > 0:
        low, high = high, high + step
    while excess(low) <= 0:
        low, high = low - step, low
    found = float(brentq(excess, low, high, xtol=PRECISION / 4))
    while excess(found) > 0:
        found += PRECISION / 4
    return math.exp(found)


def _first_guess(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Log of the noise from the central limit theorem: mu = q sqrt(T (e^(1/sigma^2) - 1)) (Bu et al. 2020, 3.2)."""
    mu = 1 / gaussian.sigma(epsilon, delta)
    return -math.log(math.log1p((mu / rate) ** 2 / steps)) / 2
