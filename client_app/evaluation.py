"""A site evaluates the global model on its own held-out records: counts for the sum, numbers for its own disk."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_privacy.config.evaluate import charge_of, exact_form, noise_of
from fl_privacy.dp.ledger import Charge
from fl_privacy.errors import FederationError, require
from fl_privacy.scores.form import Counts, Form, Tally
from fl_privacy.scores.metrics import scores
from fl_privacy.steps.base import At, Seat
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.measures import ALONE, PROBLEM, RECENT
from fl_privacy.tasks.workload import Measured
from fl_privacy.vector import Vector

MOST_ROUNDS = 10  # of the federation's training, for the model that a site trains alone


class Evaluation:
    """What a site does with its held-out records, if the federation's sites evaluate."""

    def __init__(self, seat: Seat) -> None:
        self._seat, self._federation = seat, seat.federation
        self._active = seat.federation.sites_evaluate
        self._noise = noise_of(self._federation) if self._active else None
        self._device = self._federation.site(seat.site).device
        self._journal = Journal(seat.state / "metrics") if seat.state else None

    @cached_property
    def _held_out(self) -> Dataset:
        return self._seat.work.held_out(self._seat.site)

    @cached_property
    def _exact(self) -> Form:
        return exact_form(self._federation)

    @property
    def _sent(self) -> Form:
        """The counts as they leave."""
        return self._exact if self._noise is None else self._noise.form

    @property
    def charge(self) -> Charge | None:
        """What one evaluation costs; None without noise."""
        return charge_of(self._federation) if self._active else None

    def due(self, at: At) -> bool:
        """Whether the counts of the model that this round starts from are wanted, as the federation agreed."""
        if not (self._active and at.counts and (self._noise or len(self._held_out))):
            return False  # with noise it does not show whether there are records
        length = self._sent.length
        require(at.counts == length, f"counts: the server asks for {at.counts} numbers, and this task has {length}")
        return at.farewell > 0 or (at.round - 1) % self._federation.evaluate.every == 0

    def counts(self, at: At, model: Vector) -> Counts:
        """Evaluate the model, keep the numbers here, and return the counts as they may leave."""
        found, number = self._seat.work.measured(model, self._held_out, self._device), at.farewell or at.round - 1
        if self._noise is None:
            return self._keep(at.run, number, found).vector
        with suppress(FederationError):  # one record could cause it, and whether counts leave has no noise
            self._keep(at.run, number, found)
        return self._noise.add(found.tally(self._noise.form), self._seat.key(at, "evaluation")).vector

    def rounds_alone(self, run: str) -> int:
        """How many rounds' worth of training the comparison takes; 0: there is none, or it was made before."""
        wanted = self._active and self._federation.evaluate.alone and self._journal is not None
        if not wanted or not len(self._held_out) or (self._journal and self._journal.has(run, ALONE)):
            return 0
        return min(self._federation.rounds, MOST_ROUNDS)

    def compare(self, run: str, data: Dataset, rounds: int) -> None:
        """Train a model on this site's records alone, and keep its numbers beside the final model's."""
        epochs = self._federation.task.train.epochs * rounds
        model = self._seat.work.alone(data, self._seat.site, epochs, self._device)
        self._keep(run, ALONE, self._seat.work.measured(model, self._held_out, self._device), epochs=epochs)

    def _keep(self, run: str, model: int | str, found: Measured, **facts: int) -> Tally:
        """Write the site's own numbers to its disk, and return the exact counts."""
        tally = found.tally(self._exact)
        if self._journal is not None and len(self._held_out):
            self._journal.add(run, model, {**facts, **self._further(found), **scores(tally).line()})
        return tally

    def _further(self, found: Measured) -> dict[str, Any]:
        """The task's own measures. They stay here: an error in them is no reason to send no counts."""
        try:
            return dict(self._seat.work.further(found))
        except FederationError as error:
            return {PROBLEM: str(error)}


class Journal:
    """A site's own results, one file per run. They stay on its disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recent: tuple[str, int, bytes] = "", -1, b""  # of which run, when the file had this size, its end

    def has(self, run: str, model: int | str) -> bool:
        """Whether there is a line about this model: that after a round, or the one trained alone."""
        return b"\n" + _about(model) in b"\n" + self._end(run)

    def add(self, run: str, model: int | str, line: dict[str, Any]) -> None:
        """Append a line, unless it is there: a repeated attempt evaluates the same model."""
        if self.has(run, model):
            return
        text = _about(model) + json.dumps(line)[1:].encode() + b"\n"
        if not (b"\n" + self._end(run)).endswith(b"\n"):
            text = b"\n" + text  # after half a line, which a crash left
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._path(run).open("ab") as file:
                file.write(text)
                size = file.tell()
        except OSError as error:
            raise FederationError(f"state {self._path(run)}: {error.strerror}; free some disk space") from None
        self._recent = run, size, (self._recent[2] + text)[-RECENT:]

    def _end(self, run: str) -> bytes:
        """The end of the file, read only if another process of the site wrote to it."""
        path = self._path(run)
        size = path.stat().st_size if path.exists() else 0
        if self._recent[:2] != (run, size):
            end = b""
            if size:
                with path.open("rb") as file:
                    file.seek(max(0, size - RECENT))
                    end = file.read()
            self._recent = run, size, end
        return self._recent[2]

    def _path(self, run: str) -> Path:
        return self._folder / f"{run}.jsonl"


def _about(model: int | str) -> bytes:
    """How a line begins."""
    return json.dumps({"model": model})[:-1].encode() + b", "
