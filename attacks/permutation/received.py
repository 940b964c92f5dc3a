"""The closed models that a server received, and the model that it had sent before each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attacks.common.attack import Unsuitable
from attacks.common.observed import Matrix
from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.events import Clustered, Farewell, Row
from fl_privacy.transcript.read import View
from fl_privacy.vector import Vector

MODEL = "model"


@dataclass(frozen=True)
class Received:
    """One round: a model that the server sent, and what came back from the sites that it sent it to.

    Sites that got another model are left out: all sites of a round use one order, so the most common model is enough.
    """

    round: int
    sent: Vector
    closed: Matrix

    @property
    def mean(self) -> Vector:
        """Orders of the rows agree, so their mean has less of what single sites learned."""
        return np.asarray(self.closed.mean(axis=0, dtype=np.float64), np.float32)


def received(view: View) -> Iterator[Received]:
    """One round after the other; an error if it holds no rows."""
    holders, none = dict[str, str](), True
    for number in view.rounds:
        events, arrays = view.events(number), view.round(number).arrays
        if any(isinstance(event, Farewell) for event in events):
            continue
        names = [event.name for event in sorted((e for e in events if isinstance(e, Row)), key=lambda row: row.row)]
        if "updates" not in arrays or len(names) != len(arrays["updates"]):
            raise Unsuitable(
                f"{view.folder}: round {number} has no rows with owners; this attack needs `permute: tazza`"
            )
        held = [holders.get(name, MODEL) for name in names]
        most = max(held, key=held.count)
        if most not in arrays:
            raise TranscriptError(f"{view.folder}: round {number} lacks {most}; record the run again")
        rows = arrays["updates"][[name == most for name in held]]
        none = False
        yield Received(number, arrays[most], arrays[most] + rows)
        holders |= {e.site: f"cluster-{e.after}" for e in events if isinstance(e, Clustered) and e.after is not None}
    if none:
        raise TranscriptError(f"{view.folder}: holds no round; let the run finish one first")
