"""What a round costs each party, in closed form. Every route defines its own cost (fl_privacy/routes)."""

from __future__ import annotations

from dataclasses import dataclass

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


def cost(
    coding: Coding,
    party: str,
    count: int,
    messages: float,
    *,
    models: tuple[int, int],
    updates: tuple[int, int],
    counts: tuple[int, int] = (0, 0),
) -> Cost:
    """The cost for the model and update parameters, and the bytes of counts, that a party receives and sends."""
    parameters = [model + update for model, update in zip(models, updates, strict=True)]
    sizes = [FLOAT32.nbytes(m) + coding.nbytes(u) + c for m, u, c in zip(models, updates, counts, strict=True)]
    return Cost(party, count, messages, parameters[0], parameters[1], sizes[0], sizes[1])
