"""One exchange between peers, as data: who sent what to whom, and every peer's model after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.shard import masks

Matrix = NDArray[np.float32]  # one row per peer
Ints = NDArray[np.int64]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Message:
    """Values at some coordinates (`where` is None: at all), from one peer to another."""

    sender: int
    recipient: int
    values: NDArray[np.float32]
    where: Ints | None = None


@dataclass(frozen=True)
class Exchange:
    """The models after a round, the messages that led to them, and what the next round needs of this one."""

    models: Matrix
    messages: list[Message]
    kept: Arrays = field(default_factory=dict)


def pieces(parameters: int, count: int, seed: int) -> list[Ints]:
    """The coordinates of each of `count` random, disjoint and complete pieces of a model, nearly equal in size."""
    owners = masks.owners(parameters, count, seed)
    return [np.flatnonzero(owners == piece) for piece in range(count)]
