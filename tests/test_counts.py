"""Counts on their way: a real shuffler adds them, and gives the server one sum of enough sites or none."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.coding import FLOAT32, Payload
from fl_privacy.config import Federation
from fl_privacy.ops.metrics import OFF
from fl_privacy.round.counted import sent
from fl_privacy.round.sent import Sent
from fl_privacy.routes.ends import Ask, ServerSeat, SiteSeat, Ticket
from fl_privacy.scores.form import LONGEST, Counts
from fl_privacy.tasks.workload import layout_of
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import digest
from helpers import CALL, Deployment, Keys, ask_of, collect, deploy, open_round, round_header, status

SITES, LENGTH, NUMBERS = 4, 50, 7
CONFIG = f"name: test\nsites: {SITES}\nquorum: 3\nevaluate: sites\nroute: {{kind: shuffler, n_min: 3}}\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def shuffler(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = deploy(tmp_path_factory.mktemp("shuffler"), keys, Federation.parse(CONFIG), "shuffler")
    yield deployment
    deployment.stop()


_runs = itertools.count(1)


@pytest.fixture
def run(shuffler: Deployment) -> Iterator[str]:
    name = f"run-{next(_runs)}"
    yield name
    status(shuffler.server.finish, pb.FinishRequest(run=name), timeout=CALL)


def counts_of(site: int) -> Counts:
    """Large ones too: sums wrap around at 2^64."""
    return np.random.default_rng(site).integers(0, 2**64, NUMBERS, np.uint64)


def opened(shuffler: Deployment, run: str, **changes: Any) -> pb.RoundHeader:
    terms = {"cohort": SITES, "quorum": 3, "counts": NUMBERS, **changes}
    return open_round(shuffler.server, round_header(run, 1, LENGTH, **terms))


def send(shuffler: Deployment, site: int, round: pb.RoundHeader, counts: bytes) -> bool:
    update = np.full(round.length, site, np.float32)
    return client.submit(shuffler.site(site), round, update, CALL, FLOAT32, counts=counts, floor=3)


def total(*sites: int) -> Counts:
    return np.sum([counts_of(site) for site in sites], axis=0, dtype=np.uint64)


def test_the_server_gets_the_sum_and_how_many_sites_are_in_it(shuffler: Deployment, run: str) -> None:
    round = opened(shuffler, run)
    for site in range(SITES):
        assert not send(shuffler, site, round, sent(counts_of(site)))
    release = collect(shuffler.server, round)
    assert release.counts is not None
    assert np.array_equal(release.counts, total(0, 1, 2, 3))
    assert (release.count, release.counted) == (SITES, SITES)


def test_a_site_without_counts_takes_part_in_the_round_and_not_in_the_sum(shuffler: Deployment, run: str) -> None:
    round = opened(shuffler, run)
    for site in range(SITES):
        send(shuffler, site, round, b"" if site == 2 else sent(counts_of(site)))
    release = collect(shuffler.server, round)
    assert (release.count, release.counted) == (SITES, 3)
    assert release.counts is not None
    assert np.array_equal(release.counts, total(0, 1, 3))


def test_a_sum_of_fewer_sites_than_the_floor_is_not_released(shuffler: Deployment, run: str) -> None:
    """The updates are: there are enough of them."""
    round = opened(shuffler, run)
    for site in range(SITES):
        send(shuffler, site, round, sent(counts_of(site)) if site < 2 else b"")
    release = collect(shuffler.server, round)
    assert (release.phase, release.count) == ("released", SITES)
    assert (release.counts, release.counted) == (None, 0)


def test_what_is_sent_twice_counts_once_and_cannot_be_changed(shuffler: Deployment, run: str) -> None:
    round = opened(shuffler, run)
    assert not send(shuffler, 0, round, sent(counts_of(0)))
    assert send(shuffler, 0, round, sent(counts_of(0)))
    assert status(send, shuffler, 0, round, sent(counts_of(1))) == "ALREADY_EXISTS"
    assert status(send, shuffler, 0, round, b"") == "ALREADY_EXISTS"
    for site in (1, 2, 3):
        send(shuffler, site, round, sent(counts_of(site)))
    release = collect(shuffler.server, round)
    assert release.counts is not None
    assert np.array_equal(release.counts, total(0, 1, 2, 3))


@pytest.mark.parametrize("size", [1, 8, 8 * NUMBERS - 8, 8 * NUMBERS + 8, 500_000])
def test_counts_of_another_length_are_refused(size: int, shuffler: Deployment, run: str) -> None:
    round = opened(shuffler, run)
    assert status(send, shuffler, 0, round, bytes(size)) == "INVALID_ARGUMENT"


def test_a_round_without_evaluation_takes_no_counts(shuffler: Deployment, run: str) -> None:
    round = opened(shuffler, run, counts=0)
    assert status(send, shuffler, 0, round, sent(counts_of(0))) == "INVALID_ARGUMENT"


def test_a_round_asks_for_no_more_counts_than_there_can_be(shuffler: Deployment, run: str) -> None:
    assert status(opened, shuffler, run, counts=LONGEST + 1) == "INVALID_ARGUMENT"


def test_a_server_cannot_ask_for_counts_where_the_federation_evaluates_at_the_server(
    keys: Keys, tmp_path: Path
) -> None:
    federation = Federation.parse(CONFIG.replace("evaluate: sites", "evaluate: server"))
    deployment = deploy(tmp_path, keys, federation, "shuffler")
    try:
        assert status(opened, deployment, "run") == "PERMISSION_DENIED"
        assert status(opened, deployment, "run", counts=0) == "OK"
    finally:
        deployment.stop()


class Office:
    """Sites that are invited without Flower: those in `there` answer, with counts, the others never."""

    def __init__(self, federation: Federation, keys: Keys, address: str, there: set[str]) -> None:
        self._federation, self._keys, self._address, self._there = federation, keys, address, there
        self.kept: dict[str, Payload] = {}

    def invite(self, ask: Ask, model: Payload | None = None) -> None:
        for site in self._there:
            threading.Thread(target=self._answer, args=(site, ask)).start()

    def _answer(self, site: str, ask: Ask) -> None:
        keys, layout = self._keys.of("site", site), layout_of(self._federation)
        end = self._federation.route.site(
            SiteSeat(self._federation, layout, keys, [self._address], site, "", lambda: 3, Sent(None), OFF)
        )
        last = ask.round
        ticket = Ticket(run=ask.run, federation=self._federation.digest, first=last, last=last)
        for at, model in end.rounds(ticket, None):
            assert at.farewell == ask.farewell
            end.admit(at, model)
            self.kept[site] = model
            end.deliver(at, np.empty(0, np.float32), counts_of(int(site[-1])))

    def answers(self, ask: Ask) -> list[tuple[str, str, Payload | None]]:
        return []


@pytest.mark.e2e
def test_a_site_that_is_away_at_the_farewell_does_not_fail_it(keys: Keys, tmp_path: Path) -> None:
    """The others get the final model, whoever was in a cohort, and their counts are added."""
    federation = Federation.parse(CONFIG + "deadline: 4\n")
    shuffler, run = deploy(tmp_path, keys, federation, "shuffler"), "farewell"
    layout = layout_of(federation)
    model = np.random.default_rng(5).normal(size=layout.size).astype(np.float32)
    office = Office(federation, keys, shuffler.address, {"site-0", "site-1", "site-3"})
    seat = ServerSeat(federation, layout, keys.of("server", "server"), [shuffler.address], office)
    ask = ask_of(federation, keys, run, 6, digest(model), layout, counts=NUMBERS, farewell=5)
    outcome = federation.route.server(seat).play(ask, model)
    assert (outcome.rows, outcome.count, outcome.counted) == (None, 3, 3)
    assert outcome.counts is not None
    assert np.array_equal(outcome.counts, total(0, 1, 3))
    assert set(office.kept) == {"site-0", "site-1", "site-3"}
    assert all(np.array_equal(kept, model) for kept in office.kept.values())
    shuffler.stop()


def test_only_an_audited_shuffler_keeps_single_counts(keys: Keys, tmp_path: Path) -> None:
    federation = Federation.parse(CONFIG + "audit: true\n")
    view = tmp_path / "runs" / "{run}" / "views" / "shuffler"
    deployment = deploy(tmp_path / "s", keys, federation, "shuffler", options=["--view", str(view)])
    try:
        round = opened(deployment, "a-run")
        for site in range(SITES):
            send(deployment, site, round, b"" if site == 1 else sent(counts_of(site)))
        assert collect(deployment.server, round).counted == 3
    finally:
        deployment.stop()
    from fl_privacy.transcript.read import View

    seen = View(tmp_path / "runs" / "a-run" / "views" / "shuffler").round(1).arrays["counts"]
    assert np.array_equal(seen, [counts_of(0), np.zeros(NUMBERS), counts_of(2), counts_of(3)])
