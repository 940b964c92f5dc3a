"""The models that a site keeps: the final one, and the best one that it saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from client_app.received import Received
from fl_privacy.errors import FederationError
from fl_privacy.models import kept
from fl_privacy.steps.base import At
from fl_privacy.vector import Entry, Layout, Vector

LAYOUT = Layout((Entry("w", (3,)),))


def model(round: int) -> Vector:
    return np.full(3, round, np.float32)


def play(site: Received, best: dict[int, int], seen: set[int], last: int) -> None:
    """Rounds 1 to `last`, of which the site takes part in those in `seen`, and the farewell."""
    for round in sorted(seen):
        site.see(At("run", round, "a", best=best.get(round, 0)), model(round - 1))
    site.see(At("run", last + 1, "a", farewell=last, best=best[last + 1]), model(last))


@pytest.mark.parametrize("late", [0, 1])
def test_the_best_model_is_kept_whether_it_is_known_at_once_or_a_round_later(late: int, tmp_path: Path) -> None:
    best = {round: min(2, max(0, round - 1 - late)) for round in range(1, 7)}
    play(Received(tmp_path, LAYOUT), best, {1, 2, 3, 4, 5}, 5)
    found = {which: kept.received(tmp_path / "models", "run", which) for which in ("last", "best")}  # type: ignore[arg-type]
    assert {which: one.round for which, one in found.items()} == {"last": 5, "best": 2}
    assert all((one.model == one.round).all() for one in found.values())


def test_a_site_that_missed_the_best_round_keeps_no_other_model_in_its_place(tmp_path: Path) -> None:
    best = {round: min(2, round - 1) for round in range(1, 7)}
    play(Received(tmp_path, LAYOUT), best, {1, 5}, 5)
    assert kept.received(tmp_path / "models", "run", "last").round == 5
    with pytest.raises(FederationError):
        kept.received(tmp_path / "models", "run", "best")


def test_a_simulated_site_keeps_the_final_model_which_may_be_the_best(tmp_path: Path) -> None:
    play(Received(tmp_path, LAYOUT, best=False), {round: round - 1 for round in range(1, 7)}, {1, 2, 3, 4, 5}, 5)
    assert kept.received(tmp_path / "models", "run", "best").round == 5
