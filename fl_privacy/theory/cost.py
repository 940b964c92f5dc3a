"""What a round costs each party, in closed form. Every route defines its own cost (fl_privacy/routes)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fl_privacy.coding import FLOAT32, Coding


@dataclass(frozen=True)
class Cost:
    """One party's share of one round: calls and messages it takes part in, and its vector parameters and bytes."""

    party: str
    count: int
    messages: float
    parameters_in: int
    parameters_out: int
    bytes_in: int
    bytes_out: int
    models: tuple[int, int]  # bytes of models in and out, with their seals
    updates: tuple[int, int]  # bytes of updates in and out, with their seals
    observed: int  # parameters of updates that it receives
    seals: tuple[int, int] = (0, 0)  # of the bytes in and out, those that only seal others
    does: str = ""  # what a party of this kind does that others of its kind do not

    @property
    def name(self) -> str:
        return f"{self.party} that {self.does}" if self.does else self.party


def cost(
    coding: Coding,
    party: str,
    count: int,
    messages: float,
    *,
    models: tuple[int, int],
    updates: tuple[int, int],
    counts: tuple[int, int] = (0, 0),
    sealed_models: tuple[int, int] = (0, 0),
    sealed_updates: tuple[int, int] = (0, 0),
    does: str = "",
) -> Cost:
    """The cost for the model and update parameters that it receives and sends, and the bytes of counts and seals."""
    seals = sealed_models[0] + sealed_updates[0], sealed_models[1] + sealed_updates[1]
    sent_models = FLOAT32.nbytes(models[0]) + sealed_models[0], FLOAT32.nbytes(models[1]) + sealed_models[1]
    sent_updates = coding.nbytes(updates[0]) + sealed_updates[0], coding.nbytes(updates[1]) + sealed_updates[1]
    parameters = [model + update for model, update in zip(models, updates, strict=True)]
    sizes = [sum(of) for of in zip(sent_models, sent_updates, counts, strict=True)]
    totals = parameters[0], parameters[1], sizes[0], sizes[1]
    return Cost(party, count, messages, *totals, sent_models, sent_updates, updates[0], seals, does)


class Times(NamedTuple):
    """Least seconds until all updates of a round have arrived, and then until all models have."""

    updates: float
    models: float

    @property
    def total(self) -> float:
        return self.updates + self.models


def times(costs: Iterable[Cost], rate: float) -> Times:
    """The busiest party decides, if all links have this rate (bytes per second) in both directions (ERIS, F.2.1)."""
    parties = list(costs)
    updates, models = (max(max(getattr(one, what)) for one in parties) for what in ("updates", "models"))
    return Times(updates / rate, models / rate)
