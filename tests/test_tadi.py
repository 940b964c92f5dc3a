"""TADI: coupled partitions, features, observers, tests on pairs, and the whole attack on planted rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from attacks.common import paired
from attacks.common.attack import Unsuitable
from attacks.common.knowledge import Knowledge
from attacks.membership.seen import Part, Seen
from attacks.topology import positions, priors, run, score, shadows
from attacks.topology.features import Book
from attacks.topology.looks import Look, Sight, look_of, regional
from attacks.topology.regressors import REGRESSORS, predict
from attacks.topology.run import Findings, examine
from attacks.topology.unmix import unmixed
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.tasks.partition import Coupling, coupled_shares, partition, rounded
from fl_privacy.tasks.workload import Workload, layout_of
from fl_privacy.vector import Entry, Layout

ORGANISATIONS = (6, 4, 3, 2)
CLIENTS = sum(ORGANISATIONS)
LAYOUT = Layout((Entry("w", (20, 3)), Entry("b", (3,))))


def federation(eta: float = 1.0, alpha: float = 0.5, noise: bool = False, **changes: Any) -> Federation:
    """Sites of four organisations; their classes follow from the organisation as far as eta says."""
    names = [(f"site-{o}-{i}", f"group-{o}") for o, size in enumerate(ORGANISATIONS) for i in range(size)]
    budget = {"epsilon_total": 900} if noise else {}
    dpsgd = {"kind": "dpsgd", "allocation": "fulcrum", "budget": 0.5}
    fields: dict[str, Any] = {
        "name": "tadi",
        "sites": [{"name": name, "organisation": owner, **budget} for name, owner in names],
        "rounds": 2,
        "topology": {"kind": "hierarchical", "regions": ORGANISATIONS, "leverage": {"group": 1}},
        "privatise": dpsgd if noise else {"kind": "none"},
        "task": {
            "dataset": "digits",
            "model": "mlp",
            "hidden": [16],
            "partition": {"kind": "coupled", "eta": eta, "alpha": alpha, "records": 20},
            "train": {"epochs": 2, "batch_size": 20, "lr": 0.1, "momentum": 0.0},
        },
        "route": {"kind": "server"},
    }
    return Federation.model_validate({**fields, **changes})


# Partitions


@given(
    y=st.lists(st.integers(0, 4), min_size=60, max_size=300).map(lambda y: np.array([*y, 0, 1, 2, 3, 4] * 2)),
    sites=st.integers(1, 9),
    eta=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_coupled_sites_are_disjoint_and_as_large_as_asked_or_smaller(
    y: NDArray[np.int64], sites: int, eta: float, seed: int
) -> None:
    try:
        parts = partition(y, sites, "coupled", seed, 0.5, records=6, coupling=Coupling(eta))
    except FederationError:
        assert sites > 1 or eta > 0.1  # a class is too small for what was drawn
        return
    rows = np.concatenate(parts)
    assert len(parts) == sites
    assert len(set(rows.tolist())) == len(rows)
    assert all(1 <= len(part) <= 6 for part in parts)
    assert len({len(part) for part in parts}) == 1


def test_the_coupling_decides_the_classes() -> None:
    y = np.repeat(np.arange(5), 100)
    parts = partition(y, 4, "coupled", 0, records=20, coupling=Coupling(1.0, [0, 6, 1, 0]))
    assert [set(y[part]) for part in parts] == [{0}, {1}, {1}, {0}]
    even = partition(y, 4, "coupled", 0, 1e6, records=20, coupling=Coupling(0.0))
    assert {tuple(np.bincount(y[part])) for part in even} == {(4, 4, 4, 4, 4)}
    unequal = partition(y, 3, "coupled", 0, records=None, coupling=Coupling(0.5, sizes=[40, 20, 10]))
    sizes = [len(part) for part in unequal]
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=2)
    assert sizes[1] == pytest.approx(2 * sizes[2], abs=2)


def test_shares_are_a_blend() -> None:
    drawn, half, whole = (coupled_shares(3, 4, 0.5, Coupling(eta), np.random.default_rng(0)) for eta in (0, 0.5, 1))
    np.testing.assert_allclose(half, (drawn + whole) / 2)
    np.testing.assert_array_equal(whole, np.eye(4)[[0, 1, 2]])


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9), st.integers(1, 500))
def test_rounding_keeps_the_sum_and_is_less_than_one_away(weights: list[float], count: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    found = rounded(shares, count)
    assert found.sum() == count
    assert (np.abs(found - shares * count) < 1 + 1e-6).all()


@pytest.mark.parametrize(
    ("partition", "changes", "message"),
    [
        ({"kind": "iid", "eta": 0.3}, {}, "eta: has an effect with kind: coupled only"),
        ({"kind": "coupled", "eta": 1.5}, {}, "eta"),
        ({"kind": "coupled", "sizes": [3]}, {}, "sizes: 1 values for 15 sites"),
        ({"kind": "coupled", "position": "degree"}, {"topology": None}, "degree needs a graph"),
    ],
)
def test_what_cannot_be_coupled_is_refused(partition: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    task = {"dataset": "digits", "model": "mlp", "partition": partition}
    with pytest.raises((ConfigError, ValueError), match=message):
        federation(task=task, **changes)


# Positions and features


def test_positions_are_those_of_the_graph() -> None:
    star = federation(topology={"kind": "star"})
    structure = positions.structural(star)
    assert structure[0].tolist() == [CLIENTS - 1, 0, 1.0]
    assert structure[1].tolist() == [1, 1, 0.0]
    assert positions.structural(federation(topology={"kind": "ring"}))[:, 1].tolist() == [0] * CLIENTS
    assert (positions.structural(federation())[:, 1] == 2).all()
    np.testing.assert_array_equal(positions.organisational(star).sum(axis=0), ORGANISATIONS)
    assert [len(near) for near in positions.neighbours(federation())] == [
        size - 1 for size in ORGANISATIONS for _ in range(size)
    ]


def test_features_say_nothing_of_absent_sites_and_nothing_raw_of_a_mixture() -> None:
    rng, sites = np.random.default_rng(0), 4
    book = Book(LAYOUT, [np.delete(np.arange(sites), i) for i in range(sites)])
    rows, model = rng.normal(size=(sites, LAYOUT.size)).astype(np.float32), np.zeros(LAYOUT.size, np.float32)
    there = np.array([True, True, True, False])
    book.add(model, np.where(there[:, None], rows, 0), there)
    book.add(model, np.tile(rows[:1], (sites, 1)), np.ones(sites, bool))
    found = book.features()
    norms = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(found.published[:3, 0], norms[:3], rtol=1e-5)
    assert np.isnan(found.published[3, 0])
    np.testing.assert_allclose(found.published[3, 5:6], norms[0], rtol=1e-5)
    first = found.raw.shape[1] // 2  # the mean over rounds, then the first round
    assert np.isnan(found.raw[3, first:]).all()
    np.testing.assert_allclose(found.raw[3, :first], 0, atol=1e-5)


# What observers tell


def test_a_look_shows_what_its_observer_sees() -> None:
    sites = federation().site_names
    updates = np.random.default_rng(1).normal(size=(CLIENTS, 9)).astype(np.float32)
    mean = Part(updates[:3].mean(axis=0), members=3)
    parts = dict.fromkeys(sites[:3], mean) | {sites[3]: Part(updates[3, 2:5], np.arange(2, 5))}
    look = look_of(Seen(1, np.zeros(9, np.float32), None, parts), federation())
    seen = look.of(updates)
    np.testing.assert_allclose(seen[:3], np.tile(mean.values, (3, 1)), rtol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(seen[3]), [2, 3, 4])
    assert look.there.tolist() == [True] * 4 + [False] * (CLIENTS - 4)
    assert not seen[4:].any()
    assert look.own
    assert not Look(1, 3, {0: None, 1: None}, ((0, 1),)).own


def test_the_server_of_a_hierarchy_tells_regions_apart() -> None:
    route = {"kind": "hierarchical", "regions": list(ORGANISATIONS), "n_min": 2}
    config = federation(sites=[{"name": f"s{i}"} for i in range(CLIENTS)], route=route)
    updates = np.random.default_rng(2).normal(size=(CLIENTS, 9)).astype(np.float32)
    arrays, first = {"model": np.zeros(9, np.float32)}, 0
    for number, size in enumerate(ORGANISATIONS):
        arrays[f"sum-region-{number}"] = updates[first : first + size].sum(axis=0)
        arrays[f"count-region-{number}"] = np.array([size])
        first += size

    class Recorded:
        rounds = (1,)

        def round(self, number: int) -> Any:
            return SimpleNamespace(arrays=arrays)

    own = Part(updates[0])  # a colluding region has it by name
    seen = Seen(1, arrays["model"], None, {config.site_names[0]: own})
    found = regional({"server": Recorded()}, config, seen)  # type: ignore[dict-item]
    look = look_of(replace(seen, parts={**seen.parts, **found}), config)
    assert config.site_names[0] not in found
    np.testing.assert_allclose(found[config.site_names[-1]].values, updates[-2:].mean(axis=0), rtol=1e-5)
    assert sorted(map(len, look.mixed)) == [2, 3, 4, 5]
    assert regional({"server": Recorded()}, federation(), seen) == {}  # type: ignore[dict-item]


# Tests on pairs


def test_tost_and_the_t_test_are_those_of_scipy() -> None:
    from scipy import stats

    values = np.random.default_rng(3).normal(0.001, 0.004, 18)
    found = paired.equivalence(values, 0.005)
    assert found.t_p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    lower = stats.ttest_1samp(values, -0.005, alternative="greater").pvalue
    upper = stats.ttest_1samp(values, 0.005, alternative="less").pvalue
    assert found.tost_p == pytest.approx(max(lower, upper))
    assert paired.equivalence([0.0, 0.0], 0.005).tost_p == 0
    assert paired.equivalence([0.01, 0.01], 0.005).tost_p == 1
    with pytest.raises(ValueError, match="two pairs"):
        paired.equivalence([0.1], 0.005)


def test_holm_is_never_below_the_p_value_and_keeps_the_order() -> None:
    given = {"a": 0.01, "b": 0.02, "c": 0.5}
    found = paired.holm(given)
    assert found == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.5})


def test_a_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    draws = [paired.bootstrap(rng.normal(1, 1, 30), seed, resamples=400) for seed in range(200)]
    covered = np.mean([one.low <= 1 <= one.high for one in draws])
    assert 0.86 < covered < 0.99
    assert paired.bootstrap(np.ones(9), 0).p < 0.001
    assert paired.bootstrap([-1.0, 1.0, -1.0, 1.0], 0).p > 0.3


def test_metrics_of_table_1() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(7)
    p = rng.uniform(size=25)
    guess = np.round(rng.uniform(size=25) + p, 1)
    assert score.area_under(guess, p > 0.5) == pytest.approx(roc_auc_score(p > 0.5, guess))
    assert score.lift(np.full(25, p.mean()), p) == pytest.approx(0, abs=1e-12)
    assert score.lift(p, p) == pytest.approx(p.var())
    assert score.top_k(p, p, 5) == 1
    assert score.top_k(np.zeros(25), p, 5) == pytest.approx(5 / 25)
    assert score.top_k(-p, p, 5) == 0


# Unmixing by variance


def test_equal_noise_unmixes_nothing_and_unequal_noise_does() -> None:
    rng = np.random.default_rng(11)
    sent = rng.normal(size=(4, 3000)).astype(np.float32)
    loud = sent * np.array([1.0, 1, 1, 8])[:, None].astype(np.float32)
    even = unmixed(rng.permuted(sent, axis=0), np.ones(4))
    np.testing.assert_allclose(even, np.tile(sent.mean(axis=0), (4, 1)), rtol=2e-4, atol=2e-5)
    found = unmixed(rng.permuted(loud, axis=0), np.array([1.0, 1, 1, 8]))
    assert (found >= loud.min(axis=0) - 1e-4).all()
    assert (found <= loud.max(axis=0) + 1e-4).all()
    away, truly = found - found.mean(axis=0), loud - loud.mean(axis=0)
    cosines = (away * truly).sum(axis=1) / np.linalg.norm(away, axis=1) / np.linalg.norm(truly, axis=1)
    assert cosines[3] > 0.8
    assert unmixed(loud, np.array([0.0, 1, 1, 1])).shape == loud.shape  # a site without noise: nothing is known


# Regressors


def test_regressors_find_a_line_and_stay_within_bounds() -> None:
    rng = np.random.default_rng(13)
    x, asked = rng.normal(size=(150, 3)), rng.normal(size=(50, 3))
    x[0, 0] = np.nan
    y, truly = (np.clip(0.5 + 0.3 * rows[:, 1], 0, 1) for rows in (x, asked))
    for name in REGRESSORS:
        found = predict(name, x, y, asked, 0)
        assert found.min() >= 0
        assert found.max() <= 1
        assert score.lift(found, truly) > 0.5 * truly.var(), name
    assert (predict("lightgbm", x, np.full(150, 0.2), asked, 0) == 0.2).all()


# The whole attack


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few shadows, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shadows, "TUPLES", 90)
    monkeypatch.setattr(run, "ways", lambda federation: list(WAYS))


WAYS = (
    run.Way(shadows.Plan(priors.MATCHED), False, "lightgbm"),
    run.Way(shadows.Plan(priors.MATCHED, adaptive=True), True, "ridge"),
)


def attacked(federation: Federation, monkeypatch: pytest.MonkeyPatch, mixed: bool = False) -> dict[str, Any]:
    """The measures of the attack on rounds that this test trains itself, as the server of route `server` sees them."""
    work = Workload(federation)
    sites = [shadows.Shadow(federation, work, name, work.site_data(name)) for name in federation.site_names]
    everybody = dict.fromkeys(range(CLIENTS))
    look = Look(1, CLIENTS, everybody, (tuple(range(CLIENTS)),) if mixed else ())

    def sights(*_: object) -> Iterator[Sight]:
        model = work.initial
        for round in range(1, federation.rounds + 1):
            updates = np.stack([site.update(model, round) for site in sites])
            one = Look(round, CLIENTS, look.where, look.mixed)
            yield Sight(model, one.of(updates), one)
            model = model + updates.mean(axis=0)

    monkeypatch.setattr(run, "sights", sights)
    proxy = Workload(federation).test
    knowledge = Knowledge(federation, models=object(), proxy=lambda: proxy)  # type: ignore[arg-type]
    found = examine({}, knowledge, seed=0)

    class Told:
        def __init__(self) -> None:
            self.federation = federation

        def records(self, site: str) -> Any:
            return work.site_data(site)

    return dict(score.score(found, Told()).measures)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small")
def test_without_noise_updates_tell_and_a_mixture_leaves_the_organisation(monkeypatch: pytest.MonkeyPatch) -> None:
    named = attacked(federation(), monkeypatch)
    for measure in ("a1_lift", "a2_org_lift", "org_lift", "adaptive_raw_ridge_a1_lift"):
        assert named[measure].groups["low"] > 0, measure
    assert named["a2_org_auroc"].value >= 0.95
    assert abs(named["topo_lift"].value) < 0.02  # all sites of a hierarchy are leaves
    mixed = attacked(federation(), monkeypatch, mixed=True)
    assert mixed["a1_lift"].value == pytest.approx(mixed["prior_lift"].value, abs=0.02)
    assert mixed["adaptive_raw_ridge_a1_lift"].value == pytest.approx(mixed["prior_lift"].value, abs=0.02)
    assert mixed["a2_org_auroc"].value >= 0.95


@pytest.mark.usefixtures("small")
def test_with_a_constant_share_no_channel_has_any_lift(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attacked(federation(eta=0.0, alpha=1e6), monkeypatch)
    assert found["variance"].value == pytest.approx(0, abs=1e-12)
    assert {round(one.value, 9) for name, one in found.items() if name.endswith("_lift")} == {0.0}
    assert not any(name.endswith("_auroc") for name in found)


@pytest.mark.usefixtures("small")
def test_shadows_are_kept_and_an_interrupted_attack_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    said, config = list[str](), federation(noise=True)
    work = Workload(config)
    looks = [Look(1, CLIENTS, dict.fromkeys(range(CLIENTS)), ())]
    inputs = (config, lambda: work.test, looks, [work.initial], 0)
    made = shadows.Maker.one

    def stops(self: shadows.Maker, seed: list[int]) -> Any:
        if seed[1] == 2:
            raise KeyboardInterrupt
        return made(self, seed)

    monkeypatch.setattr(shadows.Maker, "one", stops)
    with pytest.raises(KeyboardInterrupt):
        shadows.corpus(WAYS[1].plan, *inputs, said.append)
    monkeypatch.setattr(shadows.Maker, "one", made)
    assert len(said) == 3
    first = shadows.corpus(WAYS[1].plan, *inputs, said.append)
    assert "topology, matched-adaptive shadow federation 3 of 6" in said[3]
    assert len(said) == 3 + 4
    again = shadows.corpus(WAYS[1].plan, *inputs, said.append)
    assert len(said) == 3 + 4
    np.testing.assert_array_equal(first.features.raw, again.features.raw)
    assert len(first.p) == len(first.place) == 6 * CLIENTS


def test_an_adaptive_attacker_takes_each_sites_noise_and_the_other_an_even_one() -> None:
    target = federation(noise=True)
    adaptive, plain = (
        shadows.public(target, shadows.Plan(priors.MATCHED, adaptive=adapts), 1) for adapts in (True, False)
    )
    assert len(set(run.deviations(adaptive) if run.deviations(adaptive) is not None else [])) > 1
    assert len(set(run.deviations(plain) if run.deviations(plain) is not None else [])) == 1


def test_tasks_without_classes_are_unsuitable() -> None:
    forecasts = Federation.model_validate(
        {"sites": [{"name": "a"}], "task": {"dataset": "lcl", "model": "lstm"}, "route": {"kind": "server"}}
    )
    with pytest.raises(Unsuitable, match="share of a class"):
        examine({}, Knowledge(forecasts), 0)


def test_a_layout_is_found_without_data() -> None:
    assert layout_of(federation()).size == 64 * 16 + 16 + 16 * 10 + 10


def test_findings_name_all_sites() -> None:
    guess = np.full(CLIENTS, 0.5)
    names = federation().site_names
    found = Findings(names, {("", channel): guess for channel in run.CHANNELS}, {"": 0.5}, {}, (), 0)
    measures = score.comparisons("", found, np.linspace(0, 1, CLIENTS))
    assert all(one.value == 0 and one.groups["p_holm"] == 1 for one in measures.values())
