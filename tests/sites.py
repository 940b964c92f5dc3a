"""For tests: a site that trains nothing, so that its output can be inspected without a federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from client_app.site import Site
from fl_privacy.config import Federation
from fl_privacy.config.policy import open_ledger
from fl_privacy.dp.ledger import Ledger
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.steps.base import At
from fl_privacy.tasks.task import Task
from fl_privacy.vector import Entry, Layout

PARAMETERS = 50
Train = Callable[[Any], np.ndarray]


class Public(Task):
    """Nothing is fitted to its records."""

    preprocessing = "public"


class Work:
    """A workload that trains by calling `train` with the private training or None."""

    layout = Layout((Entry("w", (PARAMETERS,)),))
    task = Public()

    def __init__(self, records: int) -> None:
        self._records = range(records)
        self.train: Train = lambda private: np.ones(PARAMETERS, np.float32)

    def site_data(self, site: str) -> range:
        return self._records

    def check_model(self, records: Any) -> None:
        """It takes any."""

    def update(self, start: Any, data: Any, site: str, round: int, device: str, private: Any) -> np.ndarray:
        return self.train(private)

    def once(self, check: Any, data: Any) -> None:
        """Nothing to check."""


class Events(Log):
    """Keeps what a site logs."""

    def __init__(self) -> None:
        super().__init__("site")
        self._kept: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self._kept.append((event, fields))

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self._kept if event in names]

    @property
    def reasons(self) -> list[str]:
        """Why it sent nothing."""
        return [str(fields["reason"]) for fields in self.events("not-sent", "refused")]


class Idle:
    """The site, and a way to make its next update."""

    def __init__(self, federation: Federation, name: str, state: Path, records: int = 288) -> None:
        state.mkdir(exist_ok=True)
        self.work = Work(records)
        self.site = Site(federation, name, Keyring(state), [], state=state, workload=self.work)  # type: ignore[arg-type]
        self._ledger = lambda: open_ledger(federation, name, state)

    @property
    def ledger(self) -> Ledger:
        return self._ledger()

    def prepare(self, run: str, round: int, attempt: str, train: Train) -> np.ndarray:
        self.work.train = train
        return self.site.parcel(At(run, round, attempt), np.zeros(PARAMETERS, np.float32)).payload
