"""Fulcrum: noise by a site's leverage (Rangwala, Sinnott and Buyya 2026, Theorem V.3), and the same with floors.

A site's bound is a / sigma_i^2 + l_i with a = T / (2 |B|^2). The allocation minimises the largest one while the
variances add up to at most U. sigma_i is noise on the mean gradient, in units of the clip: T counts noised steps, and
|B| is the batch by which a step divides. Theorem V.2, which calls this bound a bound on information, does not hold
(`fl_privacy.theory.fulcrum`): what the allocation gives is a rule for dividing noise, not a guarantee.

Without a floor, a site of low leverage gets less noise than under a uniform allocation, and its own epsilon is larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_privacy.errors import FederationError
from fl_privacy.topology.leverage import Floats, name_of, valid

STEPS = 500  # Newton needs about 20 for 100,000 sites
NAMED = 5  # sites that a message names
ROUNDING = 1e-12


@dataclass(frozen=True)
class Allocation:
    """The noise of every site, K* (called `paper_bound` elsewhere: it guarantees nothing) and K_uniform.

    K_uniform is as published, without floors. With floors, K* may be above it.
    """

    sigma: Floats
    bound: float
    uniform_bound: float
    leverage: Floats
    budget: float
    window: int
    batch: float
    floor: Floats

    @property
    def uniform_sigma(self) -> float:
        """Everybody's noise under uniform DP-SGD: sqrt(U/n)."""
        return math.sqrt(self.budget / len(self.sigma))

    @property
    def gap(self) -> float:
        """K_uniform - K*, in nats."""
        return self.uniform_bound - self.bound

    @property
    def per_site(self) -> Floats:
        """a / sigma_i^2 + l_i: K* wherever no floor binds, less elsewhere."""
        return scale(self.window, self.batch) / self.sigma**2 + self.leverage


@dataclass(frozen=True)
class Certificate:
    """Multipliers of the problem's constraints: of every site's bound (they add up to 1), and of the budget."""

    weights: Floats
    price: float


def allocate(
    leverage: Sequence[float] | Floats,
    budget: float,
    window: int,
    batch: float,
    floor: float | Sequence[float] | Floats | None = None,
    names: Sequence[str] | None = None,
) -> Allocation:
    """The unique solution of Equation 3; with `floor`, of the same problem with sigma_i >= floor_i.

    sigma_i^2 = max(floor_i^2, a / (K* - l_i)), where K* makes the variances add up to U.

    >>> found = allocate([0, 0, 0, 3], budget=0.5, window=100, batch=64)
    >>> found.sigma.round(2).tolist(), round(found.uniform_bound - found.bound, 4)
    ([0.06, 0.06, 0.06, 0.7], 0.0726)
    """
    levers = valid(leverage, "leverage", names)
    _check(budget, window, batch)
    n, a = len(levers), scale(window, batch)
    if names is not None and len(names) != n:
        raise FederationError(f"names: {len(names)} for {n} sites; give one per site")
    least = _floors(floor, n, names)
    needed = math.fsum(least**2)
    if needed > budget or (needed == budget and not least.all()):
        raise FederationError(_too_small(budget, needed, least, names))
    spread = levers.max() - levers
    above = _root(spread, least**2, a, budget, budget - needed)
    if not (math.isfinite(above) and above > 0):
        raise FederationError(f"budget: {budget:g} is out of range for window {window} and batch {batch:g}; change it")
    sigma = np.maximum(least, np.sqrt(a / (above + spread)))
    top = float(levers.max())
    uniform = a * n / budget + top
    return Allocation(sigma, top + above, uniform, levers, float(budget), int(window), float(batch), least)


def _root(spread: Floats, least: Floats, a: float, budget: float, slack: float) -> float:
    """K* - max l: the root of sum max(f_i, a / (x + d_i)) - U, where d_i = max l - l_i.

    The sum is convex and falls, and at a / U it is not below U: Newton's method rises to the root without passing it.
    """
    x = a / budget
    for _ in range(STEPS):
        wanted = a / (x + spread)
        free = wanted > least
        # What the sites without a binding floor have to share; computed so that equal terms cancel.
        excess = float(np.sum((wanted - least)[free])) - slack
        slope = float(np.sum(wanted[free] ** 2)) / a
        if slope == 0 or not x + excess / slope > x:
            return x
        x += excess / slope
    return x


def certificate(found: Allocation) -> Certificate:
    """The multipliers for which `lower_bound` is K*: weight_i = price sigma_i^4 / a where the bound is attained."""
    a = scale(found.window, found.batch)
    attained = found.sigma > found.floor
    if not attained.any():
        attained = found.per_site >= found.per_site.max() * (1 - ROUNDING)
    raw = np.where(attained, found.sigma**4, 0.0)
    return Certificate(raw / raw.sum(), a / float(raw.sum()))


def lower_bound(found: Allocation, proof: Certificate) -> float:
    """What no allocation within budget and floors can be below, for any weights and price (weak duality).

    sum w_i l_i + sum_i min over s >= floor_i^2 of (w_i a / s + price s) - price U.
    """
    a = scale(found.window, found.batch)
    best = np.maximum(found.floor**2, np.sqrt(proof.weights * a / proof.price))
    inner = np.where(best > 0, proof.weights * a / np.where(best > 0, best, 1.0) + proof.price * best, 0.0)
    shared = math.fsum(proof.weights * found.leverage)
    return shared + math.fsum(inner) - proof.price * found.budget


def round_up(sigma: Sequence[float] | Floats, per_doubling: int = 4) -> Floats:
    """Every sigma rounded up to the public grid 2^(k / per_doubling), so that it is no label of one site.

    The variances then add up to at most 2^(2 / per_doubling) U, and no site's bound is larger.

    >>> round_up([0.5, 0.51, 0.7], per_doubling=2).round(4).tolist()
    [0.5, 0.7071, 0.7071]
    """
    if isinstance(per_doubling, bool) or not isinstance(per_doubling, int) or not 1 <= per_doubling <= 1024:
        raise FederationError(f"per_doubling: {per_doubling!r} is not a number of grid steps; use 1 to 1024")
    values = valid(sigma, "sigma")
    if not values.all():
        raise FederationError("sigma: 0 is on no grid; use numbers above 0")
    return np.exp2(np.ceil(per_doubling * np.log2(values) - ROUNDING) / per_doubling)


def paper_bound(sigma: float | Floats, window: int, batch: float, leverage: float | Floats = 0.0) -> float | Floats:
    """T / (2 sigma^2 |B|^2) + l (Equation 2). No guarantee: see `fl_privacy.theory.fulcrum.sign_information`."""
    return scale(window, batch) / np.square(sigma) + leverage


def dataset_term(sigma: float | Floats, window: int, batch: float | None = None) -> float | Floats:
    """2 T / sigma^2: what T steps tell at most of a site's whole data set, in nats, beside its leverage.

    Two data sets of one size may differ in every record, so two mean gradients by 2 C. A Poisson sample, divided by its
    expected size `batch`, may be larger than that: E |B|^2 / batch^2 is at most 1 + 1 / batch.
    """
    return 2 * window / np.square(sigma) * (1 if batch is None else 1 + 1 / batch)


def scale(window: int, batch: float) -> float:
    """a = T / (2 |B|^2)."""
    return window / (2 * batch**2)


def noise_multiplier(sigma: float, batch: float) -> float:
    """The multiplier of noise on a sum of clipped gradients, as Opacus and `dpsgd` take it: sigma |B|."""
    return sigma * batch


def _check(budget: float, window: int, batch: float) -> None:
    if not _positive(budget):
        raise FederationError(f"budget: {budget!r} is not a sum of variances; use a number above 0")
    if isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1:
        raise FederationError(f"window: {window!r} is not a number of noised steps; use an integer of 1 or more")
    if not _positive(batch):
        raise FederationError(f"batch: {batch!r} is not a batch size; use a number above 0")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _floors(floor: float | Sequence[float] | Floats | None, n: int, names: Sequence[str] | None) -> Floats:
    if floor is None:
        return np.zeros(n)
    found = valid([floor] * n if isinstance(floor, int | float | np.number) else floor, "floor", names)
    if len(found) != n:
        raise FederationError(f"floor: {len(found)} values for {n} sites; give one per site, or one for all")
    return found


def _too_small(budget: float, needed: float, least: Floats, names: Sequence[str] | None) -> str:
    """Which sites' floors ask for more than an even share, and the smallest budget that allows all of them."""
    order = np.argsort(-least, kind="stable")
    greedy = [int(at) for at in order if least[at] ** 2 * len(least) > budget] or [int(order[0])]
    more = f" and {len(greedy) - NAMED} more" if len(greedy) > NAMED else ""
    listed = ", ".join(name_of(at, names) for at in greedy[:NAMED])
    fix = f"raise it to {_rounded_up(needed)} or more"
    if not least.all():
        fix = f"raise it above {_rounded_up(needed)}"
    return f"budget: {budget:g} does not allow the floors of {listed}{more}; {fix}, or lower these floors"


def _rounded_up(value: float) -> str:
    """Six digits that are not below the value."""
    digits = 10.0 ** (5 - math.floor(math.log10(value)))
    return f"{math.ceil(value * digits) / digits:.6g}"
