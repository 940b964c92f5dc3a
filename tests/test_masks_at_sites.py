"""`masks: round` where sites aggregate: every aggregating site cuts its next shard from the model that it received."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import RoundFailed
from fl_privacy.round.aggregating import Aggregating
from fl_privacy.round.resident import Resident
from fl_privacy.routes.ends import Outcome
from helpers import Deployment, Keys, deploy
from residents import D, House, averaged, federation, initial
from test_placement_runs import config_of, kept_by_sites, models_of, same

ALL = ("site-0", "site-1", "site-2", "site-3")


@pytest.fixture(scope="module")
def mailbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Three of four sites train in a round, and all of them aggregate."""
    folder = tmp_path_factory.mktemp("mailbox")
    config = federation(cohort=3, quorum=2, route={"masks": "round", "n_min": 2})
    keys = Keys(folder / "pki")
    for role, name in (("server", "server"), ("mailbox", "mailbox"), *(("site", name) for name in config.site_names)):
        keys.of(role, name)
    made = deploy(folder, keys, config, "mailbox")
    yield made
    made.stop()


def play(here: House, round: int, cohort: tuple[str, ...], number: int = 1) -> Outcome:
    model = here.server.digest(here.run, round - 1, None)
    return here.server.play(here._asking.make(round, list(cohort), number, {}, model), None)


def test_the_model_is_that_of_one_average_also_where_a_site_aggregates_without_training(
    mailbox: Deployment, tmp_path: Path
) -> None:
    here = House(mailbox, tmp_path, "masks", {})
    here.enter()
    cohorts = (ALL[:3], ALL[1:], (ALL[0], *ALL[2:]), ALL[:3])
    expected = initial()
    for round, cohort in enumerate(cohorts, 1):
        assert play(here, round, cohort).count == 3
        assert np.array_equal(here.model(round), expected)
        expected = averaged(expected, cohort, round, here.federation)
    here.leave()
    for guest in here.guests.values():
        assert guest.problems == []
        assert not guest.log.events("duty-failed", "shard-refused")
        assert [event["round"] for event in guest.log.events("aggregated")] == [1, 2, 3, 4]


def test_every_round_gives_an_aggregating_site_other_coordinates(mailbox: Deployment) -> None:
    cut = mailbox.federation.route.parts(mailbox.federation, D)
    rounds = [[cut.at(round).coordinates(site) for site in ALL] for round in (1, 2)]
    for found in rounds:
        assert sorted(np.concatenate([one for one in found if one is not None])) == list(range(D))
    assert not np.array_equal(rounds[0][0], rounds[1][0])


class Forgetful(Resident):
    """Has cut no shard from the model of round 2 when its updates come; then, one from another model."""

    def _opened(self, *args: Any) -> Any:
        begin, own = Aggregating.begin, self._own
        assert own is not None
        with pytest.MonkeyPatch.context() as patch:
            if args[1].attempt not in self.attempts:
                self.attempts.append(args[1].attempt)
            if len(self.attempts) == 1:
                patch.setattr(own, "begin", lambda *_: None)
            elif len(self.attempts) == 2:
                patch.setattr(own, "begin", lambda run, after, whole, start: begin(own, run, after, bytes(32), start))
            return super()._opened(*args)

    attempts: list[str]


def test_a_shard_that_was_not_cut_from_the_round_s_model_is_not_built_on(mailbox: Deployment, tmp_path: Path) -> None:
    Forgetful.attempts = []
    here = House(mailbox, tmp_path, "forgets", {"site-2": Forgetful})
    here.enter()
    assert play(here, 1, ALL[:3]).count == 3
    for number in (1, 2):
        with pytest.raises(RoundFailed, match="site-2: shard: this site has not received the model"):
            play(here, 2, ALL[1:], number)
    assert play(here, 2, ALL[1:], 3).count == 3
    assert play(here, 3, ALL[1:]).count == 3
    here.leave()
    first = averaged(initial(), ALL[:3], 1, here.federation)
    assert np.array_equal(here.model(3), averaged(first, ALL[1:], 2, here.federation))


def test_a_restarted_site_still_has_the_shard_that_it_cut(mailbox: Deployment, tmp_path: Path) -> None:
    here = House(mailbox, tmp_path, "again", {})
    here.enter()
    play(here, 1, ALL[:3])
    play(here, 2, ALL[1:])
    here.leave()
    guest = here.guests["site-0"]
    before, after = guest.end(), guest.end()
    assert before._own is not None
    assert after._own is not None
    kept = [own._store.load("again", 1)[1]["start"] for own in (before._own, after._own)]
    whole = averaged(initial(), ALL[:3], 1, here.federation)
    mine = here.federation.route.parts(here.federation, D).at(2).split(whole)[0]
    assert all(np.array_equal(one["shard"], mine) for one in kept)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"compress": {"kind": "dsc", "p": 0.1}}, "dsc keeps references"), ({"combine": {"kind": "fedadam"}}, "moments")],
)
def test_what_keeps_state_per_coordinate_is_refused_at_sites_too(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        federation(route={"masks": "round"}, **changes)


def test_no_party_but_the_aggregating_sites_is_trusted() -> None:
    config = Federation.model_validate(
        {"sites": 3, "evaluate": "sites", "route": {"kind": "shards", "placement": "sites", "masks": "round"}}
    )
    assert [str(one) for one in config.route.trust(config)] == [
        "site-0, site-1, site-2 together can see every update and who sent it"
    ]


@pytest.mark.e2e
def test_a_run_and_a_resumed_one_make_the_model_of_processes_with_masks_of_the_run(tmp_path: Path) -> None:
    """Three of four sites train in a round, and all of them aggregate."""
    route = {"kind": "shards", "aggregators": 4, "n_min": 2}
    fields: dict[str, Any] = {"cohort": 3, "quorum": 3, "route": {**route, "placement": "sites", "masks": "round"}}
    part, whole = (config_of(4, "sites", rounds=rounds, **fields) for rounds in (1, 3))
    first = up(part, "simulation", tmp_path / "sites")
    resumed = kept_by_sites(up(whole, "simulation", tmp_path / "sites", resume=first.path), tmp_path / "sites", whole)
    processes = models_of(tmp_path, 4, "processes", "simulation", **{**fields, "rounds": 3, "route": route})
    assert same(resumed, processes)
