"""A server that breaks every rule, against a real shuffler and sites that run the product's own code."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.site import Site
from fl_privacy.config import Federation
from fl_privacy.routes.ends import Ticket
from fl_privacy.wire import client, federation_pb2 as pb
from helpers import CALL, Deployment, Keys, collect, deploy, kill, open_round, round_header, status
from sites import PARAMETERS, Events, Work

pytestmark = pytest.mark.e2e

SITES = 5
CONFIG = f"name: test\nsites: {SITES}\ncohort: 4\nquorum: 4\nrounds: 20\nroute: {{kind: shuffler, n_min: 3}}\n"
HONEST = Federation.parse(CONFIG)
FIRST, SECOND = [0, 1, 2, 3], [0, 1, 2, 4]


class Hospitals:
    """Five sites in threads of their own: each sends a vector that shows whose it is."""

    def __init__(self, folder: Path, keys: Keys, federation: Federation = HONEST) -> None:
        self._folder, self._keys, self._federation = folder, keys, federation
        self.logs = [Events() for _ in range(SITES)]

    def join(self, deployment: Deployment, run: str) -> None:
        """All sites take part in a run, until it is finished."""
        for index in range(SITES):
            threading.Thread(target=self._take_part, args=(deployment, run, index), daemon=True).start()

    def _take_part(self, deployment: Deployment, run: str, index: int) -> None:
        name, work = f"site-{index}", Work(10)
        work.train = lambda private: np.full(PARAMETERS, 10.0**index, np.float32)
        state = self._folder / name
        state.mkdir(exist_ok=True, parents=True)
        keys = self._keys.of("site", name)
        site = Site(
            self._federation, name, keys, [deployment.address], state=state, workload=work, log=self.logs[index]
        )
        site.take_part(Ticket(run=run, federation=self._federation.digest, first=1, last=20))

    def reasons(self, *indices: int) -> list[str]:
        return [reason for index in indices for reason in self.logs[index].reasons]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("pki"))
    for role, name in (*(("site", f"site-{i}") for i in range(SITES)), ("server", "server"), ("shuffler", "shuffler")):
        made.of(role, name)
    return made


@pytest.fixture
def shuffler(keys: Keys, tmp_path: Path) -> Iterator[Deployment]:
    deployment = deploy(tmp_path / "shuffler", keys, HONEST, "shuffler")
    yield deployment
    deployment.stop()


_numbers = itertools.count(1)


def ask(deployment: Deployment, sites: list[int], round: int = 1, model: float = 0.0, **lies: Any) -> pb.RoundHeader:
    """Open a round for these sites."""
    terms = {"cohort": 4, "quorum": 4, "layout": Work.layout.digest, "layers": [PARAMETERS], **lies}
    header = round_header("run", round, PARAMETERS, sites=[f"site-{i}" for i in sites], **terms)
    return open_round(deployment.server, header, np.full(PARAMETERS, model, np.float32))


def finish(deployment: Deployment) -> None:
    deployment.server.finish(pb.FinishRequest(run="run"), timeout=CALL)


def total(release: client.Release) -> float:
    assert release.rows is not None
    return float(release.rows[:, 0].sum())


def test_an_honest_round_is_the_sum_of_its_cohort(shuffler: Deployment, keys: Keys, tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, keys)
    header = ask(shuffler, FIRST)
    hospitals.join(shuffler, "run")
    assert total(collect(shuffler.server, header)) == 1111
    assert total(collect(shuffler.server, ask(shuffler, SECOND, round=2, model=1.0))) == 10111
    finish(shuffler)
    assert not hospitals.reasons(*range(SITES))


def test_one_model_is_not_released_for_two_cohorts(shuffler: Deployment, keys: Keys, tmp_path: Path) -> None:
    """The difference of the two sums would be one site's update minus another's."""
    hospitals = Hospitals(tmp_path, keys)
    header = ask(shuffler, FIRST)
    hospitals.join(shuffler, "run")
    collect(shuffler.server, header)
    for number in (1, 2):  # the same round again, or the same model under the next one
        second = ask(shuffler, SECOND, round=number)
        release = collect(shuffler.server, second)
        assert (release.phase, release.count) == ("failed", 0)
    finish(shuffler)
    assert "sent its update for this model to another one" in hospitals.reasons(0)[0]
    assert status(ask, shuffler, SECOND, 1, 2.0) == "FAILED_PRECONDITION"  # a changed model under the same round


def test_a_shuffler_that_lost_its_journal_gets_no_second_cohort_from_the_sites(
    shuffler: Deployment, keys: Keys, tmp_path: Path
) -> None:
    hospitals = Hospitals(tmp_path, keys)
    header = ask(shuffler, FIRST)
    hospitals.join(shuffler, "run")
    collect(shuffler.server, header)
    kill(shuffler)
    shutil.rmtree(tmp_path / "shuffler" / "state-0")
    second = deploy(tmp_path / "shuffler", keys, HONEST, "shuffler")
    try:
        # The first attempt by its own name, so that the new journal knows it and can call it void.
        open_round(second.server, header, np.zeros(PARAMETERS, np.float32))
        again = ask(second, SECOND)
        Hospitals(tmp_path, keys).join(second, "run")
        assert collect(second.server, again).phase == "failed"
    finally:
        second.stop()


def test_a_shuffler_that_lost_its_journal_gets_no_smaller_part_of_a_cohort_either(keys: Keys, tmp_path: Path) -> None:
    """With a quorum below the cohort it could leave out one site: the difference of the sums is that site's update."""
    loose = Federation.parse(CONFIG.replace("quorum: 4", "quorum: 3"))
    first = deploy(tmp_path / "shuffler", keys, loose, "shuffler")
    header = ask(first, FIRST, quorum=3)
    Hospitals(tmp_path, keys, loose).join(first, "run")
    assert total(collect(first.server, header)) == 1111
    kill(first)
    shutil.rmtree(tmp_path / "shuffler" / "state-0")
    second = deploy(tmp_path / "shuffler", keys, loose, "shuffler")
    try:
        hospitals = Hospitals(tmp_path, keys, loose)
        again = ask(second, FIRST, quorum=3, number=2)
        hospitals.join(second, "run")
        assert collect(second.server, again).phase == "failed"
        assert "a middleware lost its own" in hospitals.reasons(*FIRST)[0]
    finally:
        second.stop()


def test_an_attempt_whose_release_arrived_is_released_no_more(shuffler: Deployment, keys: Keys, tmp_path: Path) -> None:
    """A second mixture of the same updates would have other permutations, and other noise to level them."""
    hospitals = Hospitals(tmp_path, keys)
    header = ask(shuffler, FIRST)
    hospitals.join(shuffler, "run")
    assert total(collect(shuffler.server, header)) == 1111
    settled = pb.SettleRequest(run="run", round=1, attempt=header.attempt, commit=True)
    shuffler.server.settle(settled, timeout=CALL)
    for deployment in (shuffler, None):
        if deployment is None:
            kill(shuffler)
            deployment = deploy(tmp_path / "shuffler", keys, HONEST, "shuffler")
        try:
            model = np.zeros(PARAMETERS, np.float32)
            assert status(open_round, deployment.server, header, model) == "FAILED_PRECONDITION"
        finally:
            if deployment is not shuffler:
                deployment.stop()


def test_a_release_is_not_repeated_with_another_key(shuffler: Deployment, keys: Keys, tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, keys)
    header = ask(shuffler, FIRST)
    hospitals.join(shuffler, "run")
    collect(shuffler.server, header)
    kill(shuffler)
    shutil.rmtree(tmp_path / "shuffler" / "state-0" / "mixing")
    second = deploy(tmp_path / "shuffler", keys, HONEST, "shuffler")
    try:
        open_round(second.server, header, np.zeros(PARAMETERS, np.float32))
        Hospitals(tmp_path, keys).join(second, "run")
        assert status(collect, second.server, header) == "FAILED_PRECONDITION"
    finally:
        second.stop()


def test_a_second_cohort_is_served_once_the_first_one_is_void(shuffler: Deployment, keys: Keys, tmp_path: Path) -> None:
    """Nothing of the first attempt was released: the shuffler says so under its signature."""
    hospitals = Hospitals(tmp_path, keys)
    first = ask(shuffler, [0, 1, 2, 4], deadline=3.0)
    shuffler.party("site", "site-4").stub.abstain(
        pb.AbstainRequest(run="run", round=1, attempt=first.attempt), timeout=CALL
    )
    hospitals.join(shuffler, "run")
    assert collect(shuffler.server, first).phase == "failed"
    assert total(collect(shuffler.server, ask(shuffler, FIRST))) == 1111
    finish(shuffler)


@pytest.mark.parametrize(
    "other",
    [
        "reproducible: true\nroute: {kind: shuffler, level: model}\n",
        "route: {kind: shuffler, n_min: 2}\n",
        "seed: 5\n",
    ],
)
def test_sites_send_nothing_to_a_shuffler_with_another_config(keys: Keys, tmp_path: Path, other: str) -> None:
    text = CONFIG if "route" not in other else CONFIG.partition("route")[0]
    odd = deploy(tmp_path / "shuffler", keys, Federation.parse(text + other), "shuffler")
    try:
        hospitals = Hospitals(tmp_path, keys)
        header = ask(odd, FIRST)
        hospitals.join(odd, "run")
        assert (release := collect(odd.server, header)).phase == "failed"
        assert release.count == 0
        assert "federation: another one" in hospitals.reasons(*FIRST)[0]  # of whoever saw the round before it failed
    finally:
        odd.stop()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"layout": "0" * 64}, "layout: another one"),
        ({"layers": [1, PARAMETERS]}, "layers: not those"),
        ({"nonce": b"x" * 32}, "nonce: this site took part in another run"),
    ],
)
def test_terms_that_only_the_sites_can_check_are_checked_by_them(
    shuffler: Deployment, keys: Keys, tmp_path: Path, lie: dict[str, Any], reason: str
) -> None:
    hospitals = Hospitals(tmp_path, keys)
    header = ask(shuffler, FIRST)
    hospitals.join(shuffler, "run")
    collect(shuffler.server, header)
    assert collect(shuffler.server, ask(shuffler, FIRST, round=2, model=1.0, **lie)).phase == "failed"
    finish(shuffler)
    assert reason in hospitals.reasons(1)[0]
