"""Sites that start from different models: each gets its own, checks it, and is heard only if its reply is sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app import worker
from client_app.site import Site
from fl_privacy.coding import Payload
from fl_privacy.errors import ProtocolError, RoundFailed
from fl_privacy.round.own_models import OwnModels, root_of
from fl_privacy.routes.ends import Ask, Held, Outcome, ServerSeat, Ticket
from fl_privacy.vector import Vector
from fl_privacy.wire.stream import data_bytes, digest
from helpers import Keys, ask_of
from sites import PARAMETERS, Work
from test_clusters import DIGIT, federation


def test_a_site_finds_its_own_model_and_no_other() -> None:
    digests = {f"site-{i}": digest(np.full(4, i % 2, np.float32)) for i in range(5)}
    models = OwnModels(digests, bytes(32))
    for site, own in digests.items():
        assert root_of(models.place(site), site, own, 5) == models.root
    place = models.place("site-0")
    assert all(one.hex() not in place for one in digests.values())
    for site, own in (("site-1", digests["site-0"]), ("site-0", digests["site-1"])):
        assert root_of(place, site, own, 5) != models.root
    for wrong in ("", "{}", "[]", '["00", 9, []]', '["zz", 0, []]', '["00", 0.5, []]', '["00", 0, 1]', "[" * 5000):
        with pytest.raises(ProtocolError, match="place"):
            root_of(wrong, "site-0", digests["site-0"], 5)


class Office:
    """Tickets go straight to the workers; `swap` changes the model or the place on the way, `post` the reply."""

    def __init__(self, folder: Path, holders: Mapping[str, str]) -> None:
        self.federation = federation()
        self.keys = Keys(folder / "keys", self.federation.name)
        self.models = {f"cluster-{i}": np.full(PARAMETERS, i, np.float32) for i in range(2)}
        self.given: dict[str, Vector] = {}
        self.swap: dict[str, str] = {}
        self.made: dict[str, int] = {}
        self.post: dict[str, Any] = {}
        self._answers: list[tuple[str, str, Payload | None]] = []
        self._sites = {name: self._site(folder / name) for name in self.federation.site_names}
        server = self.keys.of("server", "server")
        seat = ServerSeat(
            self.federation,
            Work.layout,
            server,
            (),
            self,
            held=lambda: Held(self.models, {}),
            holders=lambda: holders,
            made=lambda: self.made,
        )
        self._end = self.federation.route.server(seat)

    def _site(self, state: Path) -> Site:
        state.mkdir(parents=True)
        work: Any = Work(100)
        return Site(self.federation, state.name, self.keys.of("site", state.name), [], state=state, workload=work)

    def invite(self, ask: Ask, model: Vector | None = None, place: str = "") -> None:
        (name,) = ask.cohort
        assert model is not None
        model = self.models[self.swap[name]] if name in self.swap else model
        self.given[name] = model
        facts = {"run": ask.run, "federation": self.federation.digest, "first": 1, "last": 1}
        ticket = Ticket(**facts, terms=ask.terms.to_json(), place=place, made=ask.made)
        fields, update = worker.answer(self._sites[name], ticket.model_dump(), bytearray(data_bytes(model)))
        sent = np.frombuffer(bytes(update), "<f4").copy()
        sent = self.post.get(name, lambda row: row)(sent)
        self._answers.append((name, fields["status"], sent if sent.size else None))

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        came, self._answers = self._answers, []
        return came

    def play(self) -> Outcome:
        model = self._end.digest("run", 0, None)
        return self._end.play(ask_of(self.federation, self.keys, "run", 1, model, Work.layout), None)


HOLDERS = {f"site-{i}": f"cluster-{i // 4}" for i in range(6)}


def test_each_site_gets_its_own_model_and_refuses_that_of_another_cluster(tmp_path: Path) -> None:
    office = Office(tmp_path, HOLDERS)
    office.swap = {"site-1": "cluster-1"}
    outcome = office.play()
    assert outcome.owners == ["site-0", "site-2", "site-3", "site-4", "site-5"]
    assert all((office.given[site] == int(HOLDERS[site][-1])).all() for site in outcome.owners)
    assert outcome.rows is not None
    assert outcome.rows.shape[1] == PARAMETERS + 2 * DIGIT


def test_a_site_is_shown_which_round_made_its_model_and_refuses_a_later_one(tmp_path: Path) -> None:
    office = Office(tmp_path, HOLDERS)
    office.made = {"cluster-0": 0, "cluster-1": 1}  # in round 1
    assert office.play().owners == [f"site-{i}" for i in range(4)]


def test_a_hostile_row_is_refused_and_the_round_goes_on_without_it(tmp_path: Path) -> None:
    office = Office(tmp_path, HOLDERS)

    def spoiled(value: float) -> Any:
        return lambda row: np.concatenate([row[:-1], np.array([value], np.float32)])

    office.post = {"site-0": spoiled(np.nan), "site-1": lambda row: row[:-1], "site-2": spoiled(1e30)}
    assert office.play().owners == ["site-3", "site-4", "site-5"]
    office.post |= {"site-3": lambda row: np.concatenate([row, row])}
    with pytest.raises(RoundFailed, match="2 of 6 updates came, 3 are needed"):
        office.play()
