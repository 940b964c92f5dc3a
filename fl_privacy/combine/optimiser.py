"""Server optimisers on flat vectors: what the mean update does to the model (Reddi et al. 2021, Algorithm 2).

Every rule is coordinate-wise and uses only correctly rounded operations: on a shard it gives the bits it gives on the
whole vector. The mean update is Delta_t, the direction in which the clients moved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.vector import Vector

State = dict[str, NDArray[np.float32]]
Doubles = NDArray[np.float64]
PIECE = 2**16  # coordinates worked on at a time: temporaries in float64 stay in the cache


class Optimiser(ABC):
    """A rule with its state; `state` and `restore` are all that a checkpoint needs."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._state: State = {}

    @abstractmethod
    def initial(self, name: str) -> float:
        """The value of a state array before the first step."""

    @abstractmethod
    def rule(self, model: Doubles, mean: Doubles, state: State) -> Doubles:
        """The new model of some coordinates; `state` are views, changed in place."""

    def step(self, model: Vector, mean_update: Vector) -> Vector:
        """The next model, as a new vector."""
        if model.ndim != 1 or model.shape != mean_update.shape:
            raise FederationError(f"mean_update: shape {mean_update.shape} does not fit the model's {model.shape}")
        if not self._state:
            self._state = {name: np.full(model.size, self.initial(name), np.float32) for name in self.names}
        for name, array in self._state.items():
            if array.shape != model.shape:
                raise FederationError(f"state {name}: shape {array.shape} does not fit the model's {model.shape}")
        out = np.empty(model.size, np.float32)
        for first in range(0, model.size, PIECE):
            part = slice(first, first + PIECE)
            views = {name: array[part] for name, array in self._state.items()}
            out[part] = self.rule(model[part].astype(np.float64), mean_update[part].astype(np.float64), views)
        return out

    def state(self) -> State:
        """A copy of the state by name; empty before the first step."""
        return {name: array.copy() for name, array in self._state.items()}

    def restore(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Continue from a `state` saved earlier."""
        if state and set(state) != set(self.names):
            raise FederationError(f"state: has {sorted(state)}, this optimiser needs {sorted(self.names)}")
        self._state = {name: np.array(state[name], dtype=np.float32, copy=True) for name in state}


class FedAvg(Optimiser):
    """x_{t+1} = x_t + lr Delta_t."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.lr = _positive("lr", lr)

    def initial(self, name: str) -> float:
        raise KeyError(name)

    def rule(self, model: Doubles, mean: Doubles, state: State) -> Doubles:
        return model + self.lr * mean


class Adaptive(Optimiser):
    """x_{t+1} = x_t + lr m_t / (sqrt(v_t) + tau), m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t; v_{-1} = tau^2."""

    names = ("m", "v")

    def __init__(self, lr: float, beta1: float, beta2: float, tau: float) -> None:
        super().__init__()
        self.lr, self.tau = _positive("lr", lr), _positive("tau", tau)
        self.beta1, self.beta2 = _fraction("beta1", beta1), _fraction("beta2", beta2)

    def initial(self, name: str) -> float:
        return {"m": 0.0, "v": self.tau**2}[name]

    @abstractmethod
    def second(self, v: Doubles, square: Doubles) -> Doubles:
        """v_t from v_{t-1} and Delta_t^2."""

    def rule(self, model: Doubles, mean: Doubles, state: State) -> Doubles:
        # The state is float32, as it is checkpointed; a step reads what the next one would after a restart.
        state["m"][:] = self.beta1 * state["m"].astype(np.float64) + (1 - self.beta1) * mean
        state["v"][:] = self.second(state["v"].astype(np.float64), mean * mean)
        return model + self.lr * state["m"] / (np.sqrt(state["v"].astype(np.float64)) + self.tau)


class FedAdam(Adaptive):
    """v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2; defaults as Flower's, without its bias correction."""

    def second(self, v: Doubles, square: Doubles) -> Doubles:
        return self.beta2 * v + (1 - self.beta2) * square


class FedYogi(Adaptive):
    """v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2); defaults as Flower's."""

    def second(self, v: Doubles, square: Doubles) -> Doubles:
        return v - (1 - self.beta2) * square * np.sign(v - square)


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise FederationError(f"{name}: {value} is not a positive number")
    return float(value)


def _fraction(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise FederationError(f"{name}: {value} is not in [0, 1)")
    return float(value)
