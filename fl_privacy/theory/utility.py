"""How small the squared gradient norm becomes: ERIS, Theorem 3.2, Corollary C.6 and Table 2.

Theorem 3.2 is computed with its constants, for plain mini-batch SGD. The rows of Table 2 are orders of magnitude:
constants and logarithms are left out, so only ratios between settings of one method mean something. The formula of
Q-DPSGD-1 is lost in the paper's text, and is left out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fl_privacy.errors import FederationError


def omega(kept: float) -> float:
    """Variance of random sparsification that keeps a coordinate with this probability: 1/p - 1 (Definition 3.1)."""
    if not 0 < kept <= 1:
        raise FederationError(f"kept: {kept!r} is not a retention probability; use a number above 0 and at most 1")
    return 1 / kept - 1


def shift_step(omega: float) -> float:
    """gamma = sqrt((1 + 2 omega) / (2 (1 + omega)^3)) of shifted compression (Theorem 3.2)."""
    return math.sqrt((1 + 2 * omega) / (2 * (1 + omega) ** 3))


def sgd_variance(samples: int, batch: int, gradient: float) -> float:
    """C_2 = (m - b) G^2 / (m b): batches of b of m records, gradients of norm at most G (Corollary C.6)."""
    if not 1 <= batch <= samples:
        raise FederationError(f"batch: {batch} of {samples} records; use from 1 to all of them")
    return (samples - batch) * gradient**2 / (samples * batch)


def learning_rate(smoothness: float, clients: int, omega: float, beta: float) -> float:
    """The largest step of Equation 5 with C_1 = C_3 = C_4 = 0, for any beta > 0."""
    spread = 1 + 4 * beta * (1 + omega)
    return min(1 / spread, math.sqrt(beta * clients / spread) / (1 + omega)) / smoothness


@dataclass(frozen=True)
class Start:
    """How far the first model is from the goal: f(x) - f*, and the mean of |grad f_k(x) - s_k|^2 over the clients."""

    gap: float
    shift: float


def stationarity(
    rounds: int, smoothness: float, clients: int, omega: float, beta: float, variance: float, start: Start
) -> float:
    """2 Phi_0 / (eta T) + 3 beta C_2 / ((1 + omega) L eta): bounds the mean |grad f|^2 of T rounds (Equation 6)."""
    eta = learning_rate(smoothness, clients, omega, beta)
    potential = start.gap + beta / smoothness * start.shift
    return 2 * potential / (eta * rounds) + 3 * beta * variance / ((1 + omega) * smoothness * eta)


@dataclass(frozen=True)
class Case:
    """K clients with m records each, n parameters, the variance of the compression, and the budget of a record."""

    clients: int
    samples: int
    parameters: int
    omega: float = 0.0
    epsilon: float = 1.0
    delta: float = 1e-5
    gradient: float = 1.0

    def __post_init__(self) -> None:
        positive = ("clients", "samples", "parameters", "epsilon", "delta", "gradient")
        for name in positive:
            if not getattr(self, name) > 0:
                raise FederationError(f"{name}: {getattr(self, name)!r} is out of range; use a positive number")
        if self.delta >= 1:
            raise FederationError(f"delta: {self.delta!r} is out of range; use a number below 1")
        if self.omega < 0:
            raise FederationError(f"omega: {self.omega!r} is out of range; use a number of 0 or more")

    @property
    def local(self) -> float:
        """sqrt(n log(1/delta)) / (sqrt(K) m epsilon): local differential privacy without compression."""
        noise = math.sqrt(self.parameters * math.log(1 / self.delta))
        return noise / (math.sqrt(self.clients) * self.samples * self.epsilon)


def dp_srm(case: Case) -> float:
    """sqrt(n log(1/delta)) / (K m epsilon), for one budget of all clients together."""
    return case.local / math.sqrt(case.clients)


def sdm_dsgd(case: Case) -> float:
    """sqrt(n log(1/delta)) / (sqrt(K) m epsilon), up to logarithms; only with little compression."""
    return case.local


def cdp_sgd(case: Case) -> float:
    """sqrt((1 + omega) n log(1/delta)) / (sqrt(K) m epsilon)."""
    return math.sqrt(1 + case.omega) * case.local


def soteriafl_sgd(case: Case) -> float:
    """That of CDP-SGD times 1 + sqrt(tau), with tau = (1 + omega)^(3/2) / sqrt(K)."""
    tau = (1 + case.omega) ** 1.5 / math.sqrt(case.clients)
    return cdp_sgd(case) * (1 + math.sqrt(tau))


def eris_sgd(case: Case) -> float:
    """sqrt(1 + omega) G^2 / (sqrt(K) m) (Equation 30): without noise, for a fixed step and very many rounds."""
    return math.sqrt(1 + case.omega) * case.gradient**2 / (math.sqrt(case.clients) * case.samples)


TABLE_2: dict[str, Callable[[Case], float]] = {
    "distributed-dp-srm": dp_srm,
    "sdm-dsgd": sdm_dsgd,
    "cdp-sgd": cdp_sgd,
    "soteriafl-sgd": soteriafl_sgd,
    "eris-sgd": eris_sgd,
}
