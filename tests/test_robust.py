"""Robust rules against brute force, what poisoned updates can do to them, and where a config refuses them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from fl_privacy.combine import robust
from fl_privacy.combine.rules import RULES, Combiner
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError, FederationError
from profiles import examples

Rows = NDArray[np.float32]
CLOSE = 1e-5
NEW = {
    "krum": "{kind: krum, f: 1}",
    "multi-krum": "{kind: multi-krum, f: 1}",
    "bulyan": "{kind: bulyan, f: 1}",
    "geometric-median": "{kind: geometric-median}",
    "centred-clipping": "{kind: centred-clipping, radius: 3}",
    "norm-bounding": "{kind: norm-bounding}",
    "fltrust": "{kind: fltrust, root: site-0}",
}
rules = pytest.mark.parametrize("rule", NEW)


def some(count: int, columns: int, seed: int) -> Rows:
    return np.random.default_rng(seed).normal(size=(count, columns)).astype(np.float32)


def away(one: Rows, other: Rows) -> float:
    return math.dist(one.astype(float).tolist(), other.astype(float).tolist())


def scores(rows: Rows, f: int) -> list[float]:
    """Krum's, from the definition: all pairs, one by one."""
    nearest = min(max(len(rows) - f - 2, 1), len(rows) - 1)
    others = [[away(a, b) ** 2 for j, b in enumerate(rows) if j != i] for i, a in enumerate(rows)]
    return [math.fsum(sorted(each)[:nearest]) for each in others]


sizes = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 9), st.integers(0, 2**32))


@given(size=sizes)
@examples(60)
def test_krum_and_multi_krum_are_the_definition(size: tuple[int, int, int, int]) -> None:
    f, more, columns, seed = size
    rows = some(2 * f + 3 + more, columns, seed)
    best = sorted(range(len(rows)), key=lambda row: scores(rows, f)[row])
    np.testing.assert_array_equal(robust.krum(rows, f), rows[best[0]])
    for chosen in (None, 1, len(rows)):
        wanted = rows[best[: len(rows) - f - 2 if chosen is None else chosen]].astype(float).mean(axis=0)
        np.testing.assert_allclose(robust.multi_krum(rows, f, chosen), wanted, rtol=CLOSE, atol=CLOSE)


@given(size=sizes)
@examples(40)
def test_bulyan_is_the_definition(size: tuple[int, int, int, int]) -> None:
    f, more, columns, seed = size
    rows = some(4 * f + 3 + more, columns, seed)
    left, picked = list(rows), list[Rows]()
    for _ in range(len(rows) - 2 * f):
        found = scores(np.array(left), f) if len(left) > 1 else [0.0]
        picked.append(left.pop(found.index(min(found))))
    kept = len(rows) - 4 * f
    for column in range(columns):
        values = sorted(float(row[column]) for row in picked)
        nearest = sorted(values, key=lambda value: abs(value - float(np.median(values))))[:kept]
        assert robust.bulyan(rows, f)[column] == pytest.approx(math.fsum(nearest) / kept, rel=CLOSE, abs=CLOSE)


def test_bulyan_bounds_every_coordinate_where_krum_does_not() -> None:
    """One row that is near the others but for a single coordinate: the reason for Bulyan."""
    rows = some(7, 100, 1)
    rows[3] = rows.mean(axis=0)
    rows[3, 0] = 8
    assert robust.krum(rows, 1)[0] == 8
    assert abs(robust.bulyan(rows, 1)[0]) < 2


@given(count=st.integers(1, 9), columns=st.integers(1, 4), seed=st.integers(0, 2**32))
@examples(40)
def test_no_point_is_nearer_to_all_rows_than_the_geometric_median(count: int, columns: int, seed: int) -> None:
    rows = some(count, columns, seed)

    def total(point: Rows) -> float:
        return math.fsum(away(row, point) for row in rows)

    found = robust.geometric_median(rows, iterations=1000)
    steps = [np.array(s, np.float32) for s in itertools.product((-1e-2, 0, 1e-2), repeat=columns)]
    points = [*rows, rows.mean(axis=0), *(found + step for step in steps)]
    assert total(found) <= min(map(total, points)) * (1 + 1e-4)


def test_the_geometric_median_of_known_points() -> None:
    corners = np.array([[0, 0], [0, 2], [2, 0], [2, 2]], np.float32)
    np.testing.assert_allclose(robust.geometric_median(corners), [1, 1], atol=CLOSE)
    line = np.array([[0.0], [1.0], [50.0]], np.float32)
    np.testing.assert_allclose(robust.geometric_median(line, iterations=2000), [1], atol=1e-2)
    same = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(robust.geometric_median(same), same[0])


@given(count=st.integers(1, 8), columns=st.integers(1, 6), radius=st.floats(0.1, 5), seed=st.integers(0, 2**32))
@examples(40)
def test_centred_clipping_and_norm_bounding_are_the_definition(
    count: int, columns: int, radius: float, seed: int
) -> None:
    rows, centre = some(count, columns, seed), some(1, columns, seed + 1)[0]
    wanted = centre.astype(float)
    for _ in range(2):
        moves = [row - wanted for row in rows.astype(float)]
        wanted = wanted + np.mean([m * min(1, radius / max(np.linalg.norm(m), 1e-300)) for m in moves], axis=0)
    np.testing.assert_allclose(robust.centred_clipping(rows, centre, radius, 2), wanted, rtol=CLOSE, atol=CLOSE)
    bounded = [row * min(1, radius / max(np.linalg.norm(row), 1e-300)) for row in rows.astype(float)]
    np.testing.assert_allclose(robust.norm_bounding(rows, radius), bounded, rtol=CLOSE, atol=CLOSE)
    norms = sorted(np.linalg.norm(robust.norm_bounding(rows), axis=1))
    assert norms[-1] <= np.median(np.linalg.norm(rows, axis=1)) * (1 + CLOSE)


@given(count=st.integers(1, 8), columns=st.integers(1, 6), seed=st.integers(0, 2**32))
@examples(40)
def test_fltrust_is_the_definition(count: int, columns: int, seed: int) -> None:
    rows, trusted = some(count, columns, seed), some(1, columns, seed + 1)[0]
    total, weights = np.zeros(columns), 0.0
    size = float(np.linalg.norm(trusted.astype(float)))
    for row in rows.astype(float):
        norm = float(np.linalg.norm(row))
        trust = max(0.0, float(row @ trusted) / norm / size)
        total, weights = total + trust * row * size / norm, weights + trust
    wanted = total / weights if weights else total
    np.testing.assert_allclose(robust.fltrust(rows, trusted), wanted, rtol=1e-4, atol=1e-4)


def test_fltrust_trusts_nobody_who_points_the_other_way() -> None:
    trusted = np.ones(4, np.float32)
    np.testing.assert_array_equal(robust.fltrust(np.full((3, 4), -1, np.float32), trusted), np.zeros(4))
    np.testing.assert_array_equal(robust.fltrust(np.zeros((3, 4), np.float32), trusted), np.zeros(4))
    with_one = np.array([[-9] * 4, [50] * 4], np.float32)
    np.testing.assert_allclose(robust.fltrust(with_one, trusted), trusted)


@pytest.mark.parametrize(
    ("rule", "f", "needed"), [(robust.krum, 2, 7), (robust.multi_krum, 2, 7), (robust.bulyan, 2, 11)]
)
def test_too_few_rows_are_refused(rule: object, f: int, needed: int) -> None:
    assert callable(rule)
    rule(some(needed, 3, 0), f)
    with pytest.raises(FederationError, match=f"at least {needed}, and has {needed - 1}; lower f"):
        rule(some(needed - 1, 3, 0), f)


# As choices of a config

OWNERS = [f"site-{i}" for i in range(9)]


def federation(rule: str, sites: int = 9, rest: str = "route: {kind: server}") -> Federation:
    return Federation.parse(f"sites: {sites}\n{rest}\ncombine: {NEW[rule]}")


@rules
def test_every_rule_bears_two_of_nine_that_send_something_huge(rule: str) -> None:
    text = NEW[rule].replace("f: 1", f"f: {1 if rule == 'bulyan' else 2}")
    honest = some(9, 40, 3) * np.float32(0.1) + 1
    poisoned = honest.copy()
    bad = [4] if rule == "bulyan" else [4, 7]
    poisoned[bad] = -1000
    asked = Federation.parse(f"sites: 9\nroute: {{kind: server}}\ncombine: {text}")
    found = Combiner(asked).step(np.zeros(40, np.float32), poisoned, owners=OWNERS)
    # Honest updates are 1 +- 0.1. Norm bounding lets a poisoned one count as much as an honest one, and no more.
    assert 0.5 < found.mean() < 1.2
    assert Combiner(Federation.parse("sites: 9")).step(np.zeros(40, np.float32), poisoned).mean() < -50


@rules
@given(order=st.permutations(range(9)))
@examples(10)
def test_a_reproducible_run_does_not_depend_on_the_order_of_the_rows(rule: str, order: list[int]) -> None:
    asked = federation(rule, rest="reproducible: true\nroute: {kind: server}")
    rows, model = some(9, 300, 5), np.zeros(300, np.float32)
    rows[6] = rows[2]
    moved = np.ascontiguousarray(rows[order])
    found = Combiner(asked).step(model, moved, owners=[OWNERS[i] for i in order])
    assert found.tobytes() == Combiner(asked).step(model, rows, owners=OWNERS).tobytes()


def test_centred_clipping_continues_from_the_last_result_after_a_restart() -> None:
    asked, rows, model = federation("centred-clipping"), some(9, 30, 7) + 20, np.zeros(30, np.float32)
    combiner = Combiner(asked)
    first = combiner.step(model, rows)
    again = Combiner(asked)
    again.restore(combiner.state())
    second = combiner.step(model, rows)
    assert again.step(model, rows).tobytes() == second.tobytes()
    assert np.linalg.norm(second) > np.linalg.norm(first) > 0


def test_fltrust_without_the_trusted_update_changes_nothing() -> None:
    asked, rows = federation("fltrust"), some(8, 30, 9)
    model = np.ones(30, np.float32)
    np.testing.assert_array_equal(Combiner(asked).step(model, rows, owners=OWNERS[1:]), model)
    assert (Combiner(asked).step(model, rows, owners=OWNERS[:8]) != model).any()


@rules
def test_they_are_refused_where_rows_are_not_whole(rule: str) -> None:
    hidden = "combine.kind: fltrust needs to know who sent what, which route shards hides; use server"
    part = f"combine.kind: {rule} needs whole updates, and an aggregator has only a shard; use fedavg"
    with pytest.raises(ConfigError, match=hidden if rule == "fltrust" else part):
        federation(rule, rest="route: {kind: shards}")
    with pytest.raises(ConfigError, match=r"needs whole updates, and rows of route shuffler are mixed by parameter"):
        federation(rule, rest="route: {kind: shuffler, level: parameter}")
    with pytest.raises(ConfigError, match=r"combine.kind: .* needs single updates"):
        federation(rule, rest="route: {kind: mixes}\nencode: {kind: rns}")
    assert rule in RULES


def test_fltrust_needs_owners_a_site_it_can_trust_and_all_of_them() -> None:
    with pytest.raises(ConfigError, match="needs to know who sent what, which route shuffler hides; use server"):
        federation("fltrust", rest="route: {kind: shuffler, level: model}")
    with pytest.raises(ConfigError, match="'elsewhere' is none of the sites; use one of site-0"):
        Federation.parse("sites: 9\nroute: {kind: server}\ncombine: {kind: fltrust, root: elsewhere}")
    with pytest.raises(ConfigError, match="must be in every cohort; set cohort to 9"):
        federation("fltrust", rest="cohort: 5\nroute: {kind: server}")
    with pytest.raises(ConfigError, match="'site-0' misbehaves, and judges the others"):
        Federation.parse(
            "sites: [{name: site-0, behaviour: {kind: noise}}, {name: site-1}]\naudit: true\n"
            "route: {kind: server}\ncombine: {kind: fltrust, root: site-0}"
        )
    for rule in set(NEW) - {"fltrust"}:
        assert federation(rule, rest="route: {kind: shuffler, level: model}").combine.kind == rule


def test_f_is_held_against_the_quorum() -> None:
    for rule, needed in (("krum", 5), ("multi-krum", 5), ("bulyan", 7)):
        with pytest.raises(ConfigError, match=f"{rule} with f = 1 needs {needed} updates in every round, and quorum"):
            federation(rule, sites=needed - 1)
        with pytest.raises(ConfigError, match="lower f or raise quorum"):
            federation(rule, sites=9, rest=f"quorum: {needed - 1}\nroute: {{kind: server}}")
        assert federation(rule, sites=needed).quorum == needed
