"""Closed forms that a table of an audit may show beside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_privacy.errors import FederationError
from fl_privacy.kernels.packed import bits_of
from fl_privacy.rns import moduli
from fl_privacy.theory import distribution_time, fulcrum
from fl_privacy.theory.utility import TABLE_2, Case, omega
from fl_privacy.topology.leverage import dataset_sizes


def utility(method: str, kept: float = 1.0, **case: Any) -> float:
    """The order of a method's squared gradient norm (ERIS, Table 2) if a share `kept` of the coordinates is sent."""
    if method not in TABLE_2:
        raise FederationError(f"method: {method!r} is unknown; use one of {', '.join(TABLE_2)}")
    return TABLE_2[method](Case(omega=omega(kept), **case))


def bits_per_parameter(method: str, clients: int, r: int) -> float:
    """Bits that a client sends for one parameter of r digits (Athanasiou et al. 2026, Figure 2 and Tables 1 and 9)."""
    least = moduli.least(clients, r)
    ways: dict[str, Callable[[], float]] = {
        "float32": lambda: 32,
        "rns-published": lambda: sum(moduli.primes(least)),  # the first primes, m bits for each
        "rns-unary": lambda: sum(m - 1 for m in moduli.optimal(least)),
        "rns-numbers": lambda: bits_of(moduli.optimal(least)),
        "fixed-point": lambda: (least - 1).bit_length(),
        "secret-sharing": lambda: (clients * 10**r - 1).bit_length() * (clients - 1),  # a share for every other client
    }
    if method not in ways:
        raise FederationError(f"method: {method!r} is unknown; use one of {', '.join(ways)}")
    return ways[method]()


def expansion(method: str, clients: int, r: int) -> float:
    """The size of an encoded model over that of the model in float32 (Figure 14)."""
    return bits_per_parameter(method, clients, r) / bits_per_parameter("float32", clients, r)


def shuffles(clients: int, r: int) -> float:
    """The moduli of a parameter: the bits of each are shuffled apart (Figure 11)."""
    return len(moduli.optimal(moduli.least(clients, r)))


def fulcrum_gap(graph: str, eta: float) -> float:
    """K_uniform - K* for one of the nine graphs at a coupling (Rangwala et al. 2026, Figure 3)."""
    found = fulcrum.leverages()
    if graph not in found:
        raise FederationError(f"graph: {graph!r} is unknown; use one of {', '.join(found)}")
    return fulcrum.eta_sweep({graph: found[graph]}, [eta])[0].allocation.gap


def fulcrum_bound(data: str, allocation: str, budget: float, window: int) -> float:
    """K* or K_uniform of a setting with leverage by the size of data (Figure 4)."""
    if data not in fulcrum.TRAIN_SIZES:
        raise FederationError(f"data: {data!r} is unknown; use one of {', '.join(fulcrum.TRAIN_SIZES)}")
    leverage = dataset_sizes(fulcrum.TRAIN_SIZES[data])
    found = fulcrum.pareto(leverage, [budget], [window], fulcrum.BATCHES[data])[0].allocation
    bounds = {"fulcrum": found.bound, "uniform": found.uniform_bound}
    if allocation not in bounds:
        raise FederationError(f"allocation: {allocation!r} is unknown; use one of {', '.join(bounds)}")
    return bounds[allocation]


FORMULAS: dict[str, Callable[..., float]] = {
    "distribution_time": distribution_time,
    "utility": utility,
    "bits_per_parameter": bits_per_parameter,
    "expansion": expansion,
    "moduli": shuffles,
    "fulcrum_gap": fulcrum_gap,
    "fulcrum_bound": fulcrum_bound,
}
