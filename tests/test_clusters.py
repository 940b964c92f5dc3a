"""Clusters: validation, DBSCAN, Algorithm 1, one model per cluster; hostile samples and models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.cluster import DBSCAN

from fl_privacy.coding import Payload
from fl_privacy.combine.clusters.dbscan import OUTLIER, dbscan
from fl_privacy.combine.clusters.grouping import Clustering
from fl_privacy.combine.clusters.history import History
from fl_privacy.combine.clusters.samples import LARGEST, WithSamples, draw
from fl_privacy.combine.clusters.validation import validate
from fl_privacy.combine.rules import Grouped
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError, FederationError, ProtocolError
from fl_privacy.transcript.events import Clustered, Decision, parse
from fl_privacy.vector import Vector

CONFIG = """
name: clustered
audit: true
reproducible: true
sites: SITES
quorum: 3
route: {kind: server}
combine: {kind: clusters, OPTIONS}
"""
DIGIT = 64  # numbers in a record


def federation(options: str = "samples: 2", sites: int = 6) -> Federation:
    return Federation.parse(CONFIG.replace("OPTIONS", options).replace("SITES", str(sites)))


# DBSCAN


def random_distances(seed: int, count: int = 24) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(count, 2)) * 0.4 + rng.integers(0, 3, (count, 1))
    return np.linalg.norm(points[:, None] - points[None], axis=2)


@pytest.mark.parametrize("seed", range(40))
def test_clusters_are_those_of_an_independent_dbscan(seed: int) -> None:
    distances, points = random_distances(seed), 2 + seed % 4
    eps = float(np.quantile(distances, 0.05 + 0.01 * (seed % 10)))
    ours = np.array(dbscan(distances, eps, points))
    reference = DBSCAN(eps=eps, min_samples=points, metric="precomputed").fit(distances)
    core = np.zeros(len(ours), bool)
    core[reference.core_sample_indices_] = True
    np.testing.assert_array_equal(ours == OUTLIER, reference.labels_ == OUTLIER)
    pairs = list(zip(ours[core], reference.labels_[core], strict=True))
    assert len(set(pairs)) == len({a for a, _ in pairs}) == len({b for _, b in pairs})  # the same but for the numbers
    for point in np.flatnonzero(~core & (ours != OUTLIER)):  # where the reference depends on the order, the nearest
        nearest = min(np.flatnonzero(core), key=lambda other: distances[point, other])
        assert ours[point] == ours[nearest]


def test_the_order_of_the_points_does_not_matter() -> None:
    distances = random_distances(3)
    ours = dbscan(distances, 0.3, 3)
    order = np.random.default_rng(1).permutation(len(ours))
    again = dbscan(distances[np.ix_(order, order)], 0.3, 3)
    for (a, i), (b, j) in itertools.combinations(enumerate(order), 2):
        assert (again[a] == again[b]) == (ours[i] == ours[j])
    with pytest.raises(FederationError, match="not a number"):
        dbscan(np.full((2, 2), np.nan), 0.3, 3)


# Validation


def outputs_of(count: int, seed: int = 0, senders: int = 5) -> NDArray[np.float64]:
    """Models that answer alike: (models, senders, samples, classes)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(1, senders, 2, 4)) + 0.1 * rng.normal(size=(count, senders, 2, 4))


def test_distances_are_medians_of_cosine_distances_one_by_one() -> None:
    outputs = outputs_of(4)
    found = validate(outputs, 2, 1.0).distances
    for i, j in itertools.combinations(range(4), 2):
        each = []
        for sender in range(5):
            a, b = ((outputs[m, sender] - outputs[m, sender].mean(axis=1, keepdims=True)).ravel() for m in (i, j))
            each.append(1 - a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))
        assert found[i, j] == found[j, i] == pytest.approx(np.median(each), abs=1e-12)
    a, b = outputs[0].ravel(), outputs[1].ravel()
    published = validate(outputs, 2, 1.0, eps=0.5, published=True).distances[0, 1]
    assert published == pytest.approx(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-12)


def test_eps_follows_the_round_and_a_model_that_answers_otherwise_is_an_outlier() -> None:
    for scale in (1.0, 0.1):
        outputs = outputs_of(9)
        outputs = outputs[:1] + scale * (outputs - outputs[:1])
        outputs[4] = np.random.default_rng(9).normal(size=outputs[4].shape)
        found = validate(outputs, 3, 3.0)
        assert found.labels == [0, 0, 0, 0, OUTLIER, 0, 0, 0, 0]
        assert found.eps < 0.1 * scale


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_outputs_that_are_not_finite_or_huge_harm_no_other_model(bad: float) -> None:
    outputs = outputs_of(6)
    outputs[2] *= bad
    found = validate(outputs, 3, 3.0)
    assert np.isfinite(found.distances).all()
    assert [label for row, label in enumerate(found.labels) if row != 2] == [0] * 5
    assert found.labels[2] == (OUTLIER if not np.isfinite(bad) else 0)  # only the direction of an answer counts


def test_a_minority_of_lying_samples_hides_nobody_and_as_published_it_does() -> None:
    outputs = outputs_of(8)
    outputs[7] = np.random.default_rng(5).normal(size=outputs[7].shape)  # poisoned
    outputs[:, :2] = 1e6 * np.array([1.0, 2, 3, 4])  # two of five senders: all models answer this alike, and loudly
    assert validate(outputs, 3, 3.0).labels == [0] * 7 + [OUTLIER]
    assert validate(outputs, 3, 3.0, eps=0.3, published=True).labels == [0] * 8


# Algorithm 1


def test_new_sites_join_the_cluster_that_they_are_found_with() -> None:
    history = History()
    assert history.assign([["a", "b"], ["x", "y"]]) == [1, 2]
    assert history.assign([["a", "c"], ["y", "z"]]) == [1, 2]
    assert history.clusters == {"a": 1, "b": 1, "c": 1, "x": 2, "y": 2, "z": 2}
    assert History.of(history.state()) == history
    assert History.of({}) == History()


@pytest.mark.parametrize("published", [False, True])
def test_on_a_merge_only_the_overlapping_sites_move(published: bool) -> None:
    history = History({"a": 1, "b": 1, "c": 1, "x": 2, "y": 2}, fresh=3)
    history.assign([["a", "b", "x"]], published)
    assert history.clusters["y"] == 2
    assert history.clusters["c"] == 1
    assert len({history.clusters[site] for site in "abx"}) == 1
    assert history.clusters["a"] == (3 if published else 1)


def test_sites_that_part_get_a_cluster_of_their_own_but_not_as_published() -> None:
    ours, published = (History(dict.fromkeys("abcxy", 1), fresh=2) for _ in range(2))
    ours.assign([["x", "y"], ["a", "b", "c"]])
    assert ours.clusters == {"a": 1, "b": 1, "c": 1, "x": 2, "y": 2}
    published.assign([["x", "y"], ["a", "b", "c"]], published=True)
    assert set(published.clusters.values()) == {1}


# A round at the server


def linear(model: Vector, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """A model of four classes."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x.reshape(len(x), -1) @ model.reshape(DIGIT, 4), np.float32)


class Server:
    """The server's part of rounds, whose sites send what a test says."""

    def __init__(self, options: str = "samples: 2, eps: 0.2", sites: int = 8) -> None:
        self.federation = federation(options, sites)
        self.grouping = self._new()
        self.models: dict[str, Vector] = {"model": np.zeros(4 * DIGIT, np.float32)}

    def _new(self) -> Clustering:
        made = self.federation.combine.grouping(self.federation, linear)
        assert isinstance(made, Clustering)
        return made

    def row(self, update: Vector, seed: int) -> Payload:
        return np.concatenate([update, draw(bytes([seed]) * 32, 2 * DIGIT)])

    def play(self, updates: Mapping[str, Vector]) -> Grouped:
        rows = np.stack([self.row(update, number) for number, update in enumerate(updates.values())])
        found = self.grouping.step(self.models, rows, [""] * len(rows), list(updates))
        self.models = found.models
        return found

    def resume(self) -> None:
        state, self.grouping = self.grouping.state(), self._new()
        self.grouping.restore(state)


def near(direction: int, seed: int) -> Vector:
    """An update like all others of this direction."""
    rng = np.random.default_rng(direction)
    own = np.random.default_rng([direction, seed])
    return np.asarray(rng.normal(size=4 * DIGIT) + 0.1 * own.normal(size=4 * DIGIT), np.float32)


def test_every_cluster_has_a_model_made_of_its_own_updates_and_survives_a_restart() -> None:
    server = Server()
    updates = {f"site-{i}": near(i // 5, i) for i in range(8)}  # five of one kind, three of another
    found = server.play(updates)
    assert found.noted["clusters"] == 2
    first, second = ([updates[f"site-{i}"] for i in sites] for sites in (range(5), range(5, 8)))
    np.testing.assert_allclose(found.models["cluster-1"], np.mean(first, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.models["cluster-2"], np.mean(second, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.models["model"], found.models["cluster-1"])  # for sites that are new
    assert [server.grouping.holders[f"site-{i}"] for i in (0, 7)] == ["cluster-1", "cluster-2"]
    before = dict(server.grouping.holders)
    server.resume()
    assert server.grouping.holders == before
    again = server.play({f"site-{i}": near(i // 5, 9 + i) for i in range(8)})
    np.testing.assert_allclose(
        again.models["cluster-2"],
        found.models["cluster-2"] + np.mean([near(1, 9 + i) for i in range(5, 8)], axis=0),
        rtol=1e-4,
        atol=1e-5,
    )


def test_where_every_model_is_an_outlier_none_changes_and_the_reason_is_said() -> None:
    server = Server()
    server.play({f"site-{i}": near(i // 5, i) for i in range(8)})
    before, holders = dict(server.models), dict(server.grouping.holders)
    found = server.play({f"site-{i}": near(10 + i, i) * 100 for i in range(4)})
    assert {site.group for site in found.placed} == {OUTLIER}
    assert found.models.keys() == before.keys()
    assert all(found.models[name] is before[name] for name in before)
    assert server.grouping.holders == holders
    assert "all 4 models are outliers" in found.reasons[0]
    assert set(server.grouping.made.values()) == {1}  # of round 1, also in later rounds and after a restart
    server.resume()
    server.play({f"site-{i}": near(0, i) for i in range(5)})
    assert server.grouping.made == {"model": 3, "cluster-1": 3, "cluster-2": 1}
    fresh = Server()
    assert fresh.play({f"site-{i}": near(10 + i, i) for i in range(4)}).models.keys() == {"model"}


def test_a_cluster_whose_rule_needs_more_updates_keeps_its_model() -> None:
    server = Server("samples: 2, eps: 0.2, rule: {kind: multi-krum, f: 0}, points: 2")
    found = server.play({f"site-{i}": near(i // 6, i) for i in range(8)})
    assert not found.models["cluster-2"].any()
    assert server.grouping.made == {"model": 1, "cluster-1": 1, "cluster-2": 0}
    assert found.models["cluster-1"].any()
    assert any(reason.startswith("cluster-2: its 2 updates are not combined: ") for reason in found.reasons)


def test_a_model_that_overflows_is_an_outlier_and_leaves_the_others_alone() -> None:
    server = Server()
    updates = {f"site-{i}": near(0, i) for i in range(6)}
    updates["site-6"] = np.full(4 * DIGIT, 3e38, np.float32)
    server.models = {"model": np.full(4 * DIGIT, 3e38, np.float32) * 0 + 1}
    found = server.play({**updates, "site-7": np.full(4 * DIGIT, np.finfo(np.float32).max, np.float32)})
    assert all(np.isfinite(model).all() for model in found.models.values())
    assert {place.group for place in found.placed[6:]} == {OUTLIER}


def test_a_model_that_overflows_but_answers_like_the_others_is_an_outlier_too() -> None:
    """A dead unit hides it: combined with the others, it would keep the cluster from ever moving."""
    server = Server()
    server.grouping._forward = lambda model, x: linear(np.maximum(model, 0), x)
    server.models = {"model": np.full(4 * DIGIT, 1, np.float32)}
    server.models["model"][0] = -3e38
    updates = {f"site-{i}": near(0, i) for i in range(6)}
    for update in updates.values():
        update[0] = 0
    updates["site-5"] = updates["site-0"].copy()
    updates["site-5"][0] = -3e38
    found = server.play(updates)
    assert [place.group for place in found.placed] == [0] * 5 + [OUTLIER]
    assert (found.models["cluster-1"][1:] != 1).all()


def test_a_cluster_without_sites_is_dropped_and_what_was_decided_is_recorded() -> None:
    server = Server()
    server.play({f"site-{i}": near(i // 5, i) for i in range(8)})
    found = server.play(
        {f"site-{i}": near(0, i) - server.models[server.grouping.holders[f"site-{i}"]] for i in range(8)}
    )
    assert found.models.keys() == {"model", "cluster-1"}
    assert any(reason.startswith("cluster-2: all its sites are in other clusters") for reason in found.reasons)
    moved = next(place for place in found.placed if place.site == "site-7")
    assert (moved.before, moved.after) == (2, 1)
    event = Clustered(**moved._asdict())
    assert parse(event.to_json(), "here") == event
    assert parse(Decision.of("why").to_json(), "here").to_json()["reason"] == "why"
    assert found.arrays["distances"].shape == (8, 8)


# Samples


def test_samples_are_bounded_and_nothing_but_samples() -> None:
    drawn = draw(bytes(32), 10_000)
    assert np.abs(drawn).max() <= LARGEST
    assert abs(drawn.mean()) < 0.05
    assert abs(drawn.std() - 1) < 0.05
    assert (drawn != draw(bytes([1]) * 32, 10_000)).any()


def test_a_row_of_another_length_or_with_samples_that_no_site_sends_is_refused() -> None:
    coding = federation().coding
    assert isinstance(coding, WithSamples)
    assert coding.length(10) == 10 + 2 * DIGIT
    row = np.zeros(coding.length(10), np.float32)
    coding.check(row)
    for value, message in ((np.nan, "not finite"), (np.inf, "not finite"), (LARGEST * 1.01, "no honest sample")):
        row[-1] = value
        with pytest.raises(ProtocolError, match=message):
            coding.check(row)
    rows = np.arange(2 * coding.length(10), dtype=np.float32).reshape(2, -1)
    np.testing.assert_array_equal(coding.decode(rows, 10), rows[:, :10])
    stored = coding.stored(rows)
    np.testing.assert_array_equal(np.hstack([stored["updates"], stored["samples"]]), rows)


# Configs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("published: true", r"combine.eps: the published form has a fixed distance"),
        ("lr: 0.5", r"combine.lr: 0.5 has no effect with clusters; set combine.rule.lr"),
        ("points: 4", r"combine.points: 4 is more than the quorum of 3"),
        ("record: [64]", r"combine.record: digits says it itself; remove it"),
        ("rule: {kind: clusters}", "clusters"),
        ("rule: {kind: fltrust, root: site-0}", r"combine.rule.kind: fltrust needs one site in all clusters"),
        ("rule: {kind: krum, f: 3}", r"combine.rule.f: krum with f = 3 needs 9 updates"),
        ("samples: 2}\nencode: {kind: rns", r"clusters needs whole float32 updates|needs single updates|rns"),
        ("samples: 2}\ntask: {code: none.py", r"none.py"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        federation(options)


@pytest.mark.parametrize("route", ["shuffler, level: model, n_min: 2", "shards, aggregators: 2, n_min: 2"])
def test_a_route_that_hides_who_sent_what_is_refused(route: str) -> None:
    text = CONFIG.replace("OPTIONS", "samples: 2").replace("SITES", "6").replace("kind: server", f"kind: {route}")
    with pytest.raises(ConfigError, match=r"combine.kind: clusters needs"):
        Federation.parse(text)
