"""The running steps of one site, with their state on its disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fl_privacy.coding import Payload
from fl_privacy.round.checkpoints import Checkpoints
from fl_privacy.steps.base import SLOTS, At, Guard, Seat
from fl_privacy.vector import Vector


class Pipeline:
    """privatise, permute, compress, encode: in this order for what leaves, in reverse for what arrives."""

    def __init__(self, seat: Seat) -> None:
        self.guard: Guard = seat.federation.privatise.start(seat)
        rest = [step.start(seat) for step in seat.federation.steps[1:]]
        self._steps, self._state = [self.guard, *rest], seat.state
        self._beside = seat.federation.combine.start(seat)

    def inward(self, model: Vector, at: At, held: Sequence[bytes] = ()) -> Vector:
        """The model as this site trains it. The steps continue from the last round that this site took part in.

        `held` is what the receivers of its updates have of it.
        """
        for slot, step in zip(SLOTS, self._steps, strict=True):
            saved = self._saved(slot, at)
            before = [round for round in saved.rounds() if round < at.round] if saved else []
            step.restore(saved.load(before[-1]) if saved and before else {})
            step.compare(held)
        for step in reversed(self._steps):
            model = step.inward(model, at)
        return model

    def outward(self, update: Vector, at: At) -> Payload:
        """The update as it travels; the steps' state is on disk when this returns."""
        payload: Payload = update
        for slot, step in zip(SLOTS, self._steps, strict=True):
            payload = step.outward(payload, at)
            saved, state = self._saved(slot, at), step.state()
            if saved is not None and state:
                saved.save(at.round, state)
        return self._beside.outward(payload, at)

    def stamp(self, at: At) -> bytes:
        """What goes with an upload."""
        return b"".join(step.stamp(at) for step in self._steps)

    def truth(self, at: At) -> dict[str, NDArray[Any]]:
        """What scoring attacks needs to know of the steps."""
        return {name: array for step in self._steps for name, array in step.truth(at).items()}

    def notes(self) -> dict[str, Mapping[str, Any]]:
        """By slot, what the site logs of the update that just left."""
        return {slot: notes for slot, step in zip(SLOTS, self._steps, strict=True) if (notes := step.notes())}

    def _saved(self, slot: str, at: At) -> Checkpoints | None:
        return Checkpoints(self._state / "steps" / at.run / slot) if self._state else None
