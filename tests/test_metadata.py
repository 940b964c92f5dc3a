"""The metadata attack: everything on the baseline, nothing through the shuffler but membership and reply times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import attacks
from attacks.common.observed import Observation
from attacks.metadata.run import Pairs, pairs
from attacks.metadata.score import attribution, membership, reply_times
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.transcript.events import Event, Receipt

CONFIG = """
name: metadata-{kind}
seed: 5
sites: {sites}
cohort: {cohort}
quorum: {cohort}
rounds: {rounds}
rounds_per_message: 1
audit: true
task: {{train: {{epochs: 1}}}}
privatise: {privatise}
route: {route}
"""
PLAIN = {"sites": "8", "cohort": "6", "privatise": "{kind: none}"}
TIERS = {"sites": "{count: 8, epsilon: [2, 8]}", "cohort": "7", "privatise": "{kind: ldp}"}
SMALL = {**TIERS, "sites": "{count: 6, epsilon: [2, 8]}", "cohort": "6"}
DOCUMENTED = Path(__file__).parent.parent / "configs" / "metadata.yaml"
SERVER, SHUFFLER = "{kind: server}", "{kind: shuffler, level: model, n_min: 3}"


def federation(kind: str, route: str, rounds: int, **config: str) -> Federation:
    return Federation.parse(CONFIG.format(kind=kind, route=route, rounds=rounds, **config))


def measured(made: Federation, folder: Path, engine: str) -> dict[str, dict[str, float]]:
    result = up(made, engine, folder)
    assert result.status == "completed", result.reason
    return attacks.replay(Path(result.path), ["metadata"], seeds=1)["metadata"]["measures"]


# Planted cases: six sites of two tiers, whole models, and receipts with times


def planted(rounds: int, ordered: bool, late: bool) -> tuple[list[Pairs], list[np.ndarray]]:
    """Rows of a tier in the order of their senders' receipts, or in none; receipts in its record or the next."""
    made, random = federation("planted", SHUFFLER, rounds, **SMALL), np.random.default_rng(3)
    found, owners = list[Pairs](), list[np.ndarray]()
    for number in range(1, rounds + 1):
        times = random.permutation(6).astype(float)
        receipts: list[Event] = [Receipt(name=f"site-{i}", status="done", time=1e9 + times[i]) for i in range(6)]
        tiers = [random.permutation(np.arange(first, 6, 2)) for first in (0, 1)]
        order = np.concatenate([sorted(tier, key=times.__getitem__) if ordered else tier for tier in tiers])
        seen = Observation(
            number,
            np.zeros(1, np.float32),
            np.zeros((6, 1), np.float32),
            ("2",) * 3 + ("8",) * 3,
            frozenset(made.site_names),
        )
        events: tuple[list[Event], list[Event]] = ([], receipts) if late else (receipts, [])
        found.append(pairs(seen, *events, made))
        owners.append(order.astype(np.int64))
    return found, owners


@pytest.mark.parametrize("late", [False, True])
def test_rows_in_the_order_of_replies_are_attributed(late: bool) -> None:
    found = attribution(*planted(40, True, late), seed=0)
    assert found["attribution"].value > 0.95 > 2 * found["attribution"].chance
    assert found["attribution interval"].value < 0.2


def test_rows_in_no_order_are_attributed_by_their_tier_and_not_beyond() -> None:
    """The tier is public by design: chance knows it."""
    found = attribution(*planted(120, False, False), seed=0)
    assert found["attribution"].chance == pytest.approx(1 / 3)
    assert abs(found["attribution"].value - 1 / 3) <= found["attribution interval"].value


def test_a_site_that_always_replies_at_its_own_time_is_recognised() -> None:
    """All replies of a planted round come in a random order: only sites that keep theirs are recognised."""
    random, _ = planted(40, False, False)
    found = reply_times(random, seed=0)
    assert abs(found["reply times"].value - found["reply times"].chance) <= found["reply times interval"].value
    slow = [Pairs(one.round, one.sites, one.features, one.compatible, np.arange(24.0).reshape(6, 4)) for one in random]
    assert reply_times(slow, seed=0)["reply times"].value == 1.0


def test_membership_is_certain_unless_a_site_abstains() -> None:
    rounds, owners = planted(4, False, False)
    present = [set(one.tolist()) for one in owners]
    found = membership(rounds, present, sites=12)
    assert (found.value, found.chance) == (1.0, 0.5)
    assert membership(rounds, [one - {0} for one in present], 12).value == pytest.approx(11 / 12)


# Recorded runs


@pytest.mark.e2e
def test_the_baseline_tells_everything(tmp_path: Path) -> None:
    found = measured(federation("server", SERVER, 4, **PLAIN), tmp_path, "simulation")
    assert found["attribution"]["value"] > 0.99 > 2 * found["attribution"]["chance"]


@pytest.mark.e2e
def test_through_the_shuffler_metadata_attribute_no_better_than_chance(tmp_path: Path) -> None:
    found = measured(federation("shuffled", SHUFFLER, 40, **TIERS), tmp_path, "simulation")
    value, chance = found["attribution"]["value"], found["attribution"]["chance"]
    assert value - chance <= found["attribution interval"]["value"]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_with_tiers_and_real_reply_times_they_attribute_no_better_than_chance(tmp_path: Path) -> None:
    """Real processes, and a Flower message per round, so that rounds have receipts; the docs have a longer run."""
    text = DOCUMENTED.read_text().replace("rounds: 24", "rounds: 6").replace("epochs: 600", "epochs: 1")
    found = measured(Federation.parse(text), tmp_path, "local")
    value, chance = found["attribution"]["value"], found["attribution"]["chance"]
    assert chance == pytest.approx(2 / 7)  # tiers of three and four sites
    assert value - chance <= found["attribution interval"]["value"]
    assert found["membership"]["value"] == 1.0 > found["membership"]["chance"]
    assert "reply times" in found
