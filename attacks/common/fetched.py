"""The global models of a run: every site fetches them, so they are no secret of the parties that combine updates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import TranscriptError
from fl_privacy.round.checkpoints import CheckpointError, Checkpoints
from fl_privacy.transcript.read import Run

Vector = NDArray[np.float32]
NOT_MODELS = ("moment.", "kept.")  # arrays of a server's checkpoint that are no models


class Models:
    """The model before and after each round, from the record of whoever had it whole: the server, or the evaluator."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def before(self, round: int) -> Vector:
        """What the sites trained from in a round."""
        found = self._recorded("server", round)
        found = self._recorded("evaluator", round - 1) if found is None else found
        if found is None:
            raise TranscriptError(f"{self._run.path}: nobody recorded the model before round {round}; record it again")
        return found

    def after(self, round: int) -> Vector | None:
        """What the round made of it; None if nobody recorded it."""
        found = self._recorded("evaluator", round)
        found = self._recorded("server", round + 1) if found is None else found
        return self._checkpointed(round) if found is None else found

    def named(self, round: int) -> dict[str, Vector]:
        """All models by name after this round, or after the last one before it with a checkpoint: one, or several."""
        saved = Checkpoints(self._run.path / "checkpoints")
        last = max((one for one in saved.rounds() if one <= round), default=None)
        if last is None:
            raise TranscriptError(f"{self._run.path}: the server kept no model; use a route whose server has it")
        return {name: array for name, array in saved.load(last).items() if not name.startswith(NOT_MODELS)}

    def _checkpointed(self, round: int) -> Vector | None:
        """The last model of a server is in no view: it sends it to nobody as the start of a round."""
        try:
            return Checkpoints(self._run.path / "checkpoints").load(round).get("model")
        except CheckpointError:
            return None

    def _recorded(self, observer: str, round: int) -> Vector | None:
        if observer not in self._run.observers:
            return None
        view = self._run.view(observer)
        return view.round(round).arrays.get("model") if round in view.rounds else None
