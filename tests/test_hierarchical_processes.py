"""Route hierarchical with real regional processes: federated averaging, and rounds that survive a killed region."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chains import Chain, chain, started
from fl_privacy.combine import mean
from fl_privacy.config import Federation
from fl_privacy.errors import RoundFailed
from helpers import kill

pytestmark = pytest.mark.e2e
CONFIG = """
name: test
sites: 12
rounds: 4
quorum: QUORUM
deadline: 60
reproducible: EXACT
evaluate: server
route: {kind: hierarchical, regions: [5, 4, 3], n_min: 3}
"""


def federation(quorum: int = 12, exact: bool = False) -> Federation:
    return Federation.parse(CONFIG.replace("QUORUM", str(quorum)).replace("EXACT", str(exact).lower()))


def flat(one: Chain, *left_out: str) -> Any:
    rows = [update for site, update in sorted(one.updates.items()) if site not in left_out]
    return mean.weighted(np.stack(rows), exact=one.federation.reproducible)


@pytest.mark.parametrize("exact", [False, True])
def test_the_model_is_that_of_federated_averaging(exact: bool, tmp_path: Path) -> None:
    with chain(tmp_path, federation(exact=exact)) as one:
        for round in (1, 2):
            outcome = one.play(round, seed=round)
            assert (outcome.count, outcome.rows, outcome.noted) == (12, None, {"regions": 3})
            if exact:
                assert outcome.mean.tobytes() == flat(one).tobytes()
            else:
                np.testing.assert_allclose(outcome.mean, flat(one), rtol=0, atol=4 * 0.1 * 2.0**-24)
        assert not one.errors


def test_a_region_that_is_gone_is_left_out_where_the_quorum_allows(tmp_path: Path) -> None:
    with chain(tmp_path, federation(quorum=7)) as one:
        gone = one.federation.route.members(one.federation)[1]  # type: ignore[attr-defined]
        kill(one.mixes[1])
        outcome = one.play()
        assert (outcome.count, outcome.noted) == (8, {"regions": 2})
        assert "sum-region-1" not in outcome.seen
        np.testing.assert_allclose(outcome.mean, flat(one, *gone), rtol=0, atol=4 * 0.1 * 2.0**-24)
        one.mixes.pop(1)


def test_without_a_region_a_round_fails_where_the_quorum_needs_it_and_nothing_is_asked_of_the_sites(
    tmp_path: Path,
) -> None:
    made = federation()
    short = Federation.model_validate({**made.model_dump(), "deadline": 5})
    with chain(tmp_path, short) as one:
        kill(one.mixes[2])
        with pytest.raises(RoundFailed, match="regions have 9 of 12 sites, 12 are needed; region-2: "):
            one.play()
        assert not one.mixes[0].events("accepted")
        one.mixes.pop(2)


def test_killing_a_region_in_the_middle_of_a_round_loses_no_round(tmp_path: Path) -> None:
    """It is killed when it has updates, and started again on its port, as its supervisor does."""
    made = federation(exact=True)
    with chain(tmp_path, made) as one:
        victim, late = one.mixes[1], threading.Event()
        slow = made.route.members(made)[1][-1]  # type: ignore[attr-defined]

        def wait(name: str, end: Any) -> None:
            deliver = end.deliver

            def slowly(*given: Any) -> None:
                if name == slow:
                    late.wait(60)
                deliver(*given)

            end.deliver = slowly

        one.lies = wait

        def strike() -> None:
            until = time.monotonic() + 60
            while len(victim.events("accepted")) < 3 and time.monotonic() < until:
                time.sleep(0.02)
            kill(victim)
            late.set()

        striking = threading.Thread(target=strike)
        striking.start()
        with pytest.raises(RoundFailed, match="regions have 8 of 12 sites, 12 are needed; region-1: "):
            one.play()
        striking.join()
        options = ("--listen", victim.address)
        one.mixes[1] = started(tmp_path, one.keys, made, 1, {}, options)
        outcome = one.play()  # the same attempt
        assert outcome.count == 12
        assert outcome.mean.tobytes() == flat(one).tobytes()
        for region in (0, 2):  # what they released before is released again, and nobody sends it twice
            assert len(one.mixes[region].events("released")) == 1
        assert one.play(2, seed=2).count == 12
