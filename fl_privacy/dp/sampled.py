"""One round of DP-SGD as a mechanism: how often it samples, and the least noise that keeps it within a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from fl_privacy.dp import gaussian
from fl_privacy.dp.ledger import Charge, compose
from fl_privacy.errors import FederationError

UNIT, ADJACENCY = "record", "add-or-remove"
PRECISION = 1e-3  # relative; what is found is never below the least noise
WIDEN = 1.25
TINY = 1e-12


@dataclass(frozen=True)
class Plan:
    """Sampling rate, steps, bound of a record's gradient, and noise relative to it; `batch` is the expected size."""

    rate: float
    steps: int
    batch: float
    clip: float
    noise: float

    @property
    def charge(self) -> Charge:
        """What a round costs."""
        return Charge(self.noise, UNIT, ADJACENCY, self.rate, self.steps)


@dataclass(frozen=True)
class Private:
    """What makes a training private: its plan, and a key that is used once."""

    plan: Plan
    key: bytes

    @property
    def clean(self) -> Private:
        """The same batches without clipping and noise: what an attack is scored against."""
        return replace(self, plan=replace(self.plan, clip=math.inf, noise=0.0))


def plan(records: int, epochs: int, batch_size: int, clip: float, epsilon: float, delta: float) -> Plan:
    """The plan of a site with so many records: 1/rate steps an epoch, in each of which a record is expected once.

    1/rate is a whole number, so sites of similar size have the same plan and the noise is solved once for all of them.
    """
    if records < 1:
        raise FederationError("data: a site has no records to train on; use fewer sites or another partition")
    a_pass = math.ceil(records / batch_size)
    rate, steps = 1 / a_pass, epochs * a_pass
    return Plan(rate, steps, records * rate, clip, noise_multiplier(epsilon, delta, rate, steps))


@lru_cache(maxsize=4096)
def noise_multiplier(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Least noise, to a thousandth, with which `steps` sampled Gaussians stay within (epsilon, delta) by the ledger.

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
    """Logarithm of the noise by the central limit theorem: mu = q sqrt(T (e^(1/sigma^2) - 1)) (Bu et al. 2020, 3.2)."""
    mu = 1 / gaussian.sigma(epsilon, delta)
    return -math.log(math.log1p((mu / rate) ** 2 / steps)) / 2
