"""The Privacy Inference Attack: its parts on planted cases, and the whole attack on recorded runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

import attacks
from attacks.common.knowledge import Knowledge, knowledge_of
from attacks.common.observed import Observation, as_received, observe
from attacks.common.truth import Truth, mixed, owners_of
from attacks.privacy_inference import linkage, unmixing
from attacks.privacy_inference.denoiser import Denoiser, learn
from attacks.privacy_inference.run import examine
from attacks.privacy_inference.score import Known, judge
from commands import cli, json_of
from fl_privacy.config import Federation
from fl_privacy.dp import ldp
from fl_privacy.errors import FederationError
from fl_privacy.shuffle import model, parameter
from fl_privacy.shuffle.job import Job, MixingSet, TopUp, mix
from fl_privacy.tasks.attacker import facts_of
from fl_privacy.transcript import open_run

DELTA = 1e-5
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
PAPER = Path(__file__).parent.parent / "configs" / "papers" / "intrashuffler.yaml"


def low_rank(
    count: int, size: int = 2000, rank: int = 4, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Clean updates near a few directions, and those directions."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(np.random.default_rng(99).normal(size=(size, rank)))[0]
    weights = rng.normal(size=(count, rank)) * np.array([3.0, 2.0, 1.5, 1.0])[:rank]
    return (weights @ directions.T).astype(np.float32), directions.astype(np.float32)


def seen_of(rows: NDArray[np.float32], tiers: tuple[str, ...]) -> Observation:
    return Observation(1, np.zeros(rows.shape[1], np.float32), rows, tiers, frozenset())


# Parts


def test_the_denoiser_is_the_best_linear_one() -> None:
    """On fresh pairs it beats the noisy update, and every other shrinkage of the same components."""
    rng = np.random.default_rng(1)
    aux, _ = low_rank(400)
    clean, _ = low_rank(300, seed=2)
    noisy = (clean + rng.normal(0, 0.5, clean.shape)).astype(np.float32)
    denoiser = learn(aux, [seen_of(noisy, ("1",) * len(noisy))])
    assert denoiser.noise["1"] == pytest.approx(0.25, rel=0.02)
    found = denoiser(noisy, "1")
    error = float(((denoiser.vectors(found) - clean) ** 2).sum())
    components = np.asarray(noisy @ denoiser.directions, np.float64)
    for factor in (0.5, 0.8, 1.2):
        other = denoiser.vectors(denoiser.shrink(components, 0.25) * factor)
        assert error < ((other - clean) ** 2).sum()
    assert error < ((denoiser.vectors(components) - clean) ** 2).sum()
    cosine = (linkage.unit(denoiser.vectors(found).astype(float)) * linkage.unit(clean.astype(float))).sum(axis=1)
    raw = (linkage.unit(noisy.astype(float)) * linkage.unit(clean.astype(float))).sum(axis=1)
    assert raw.mean() < 0.25 < 0.9 < cosine.mean()


def test_links_go_to_other_rounds_within_the_window() -> None:
    features = np.array([[1.0, 0], [1, 0.01], [0, 1], [1, 0.02], [0, 1.1]])
    rounds = np.array([0, 0, 1, 1, 50])
    assert linkage.nearest(features, rounds).tolist() == [3, 3, 1, 1, -1]


def test_a_known_site_is_detected_in_whole_rows_but_not_in_mixed_ones() -> None:
    rng = np.random.default_rng(0)
    sites = linkage.unit(rng.normal(size=(12, 60)))
    invited, rows, shuffled_rows = [], [], []
    for number in range(40):
        there = rng.choice(12, 5, replace=False)
        invited.append(frozenset(f"s{i}" for i in there))
        found = sites[there] + rng.normal(0, 0.02, (5, 60))
        rows.append(found)
        shuffled = found.astype(np.float32)
        parameter.shuffle(shuffled, number.to_bytes(32, "big"))
        shuffled_rows.append(shuffled.astype(float))
    apart = []
    for features in (rows, shuffled_rows):
        found = linkage.presence(features, invited, lambda round, site: np.arange(5), rng)
        assert len(found.names) == 12
        there = np.array([[name in invited[t] for name in found.names] for t in found.rounds])
        apart.append(float(found.scores[there].mean() - found.scores[~there].mean()))
    assert apart[0] > 0.35 > 0.15 > apart[1]


def test_whole_rows_are_recognised_and_mixed_ones_are_not() -> None:
    rng = np.random.default_rng(3)
    aux, _ = low_rank(200)
    rows, _ = low_rank(8, seed=5)
    rows = (rows + rng.normal(0, 0.1, rows.shape)).astype(np.float32)
    denoiser = learn(aux, [seen_of(rows, ("1",) * 8)])
    assert unmixing.whole([unmixing.coherence(rows, "1", denoiser, rng)])
    shuffled = rows.copy()
    parameter.shuffle(shuffled, b"k" * 32)
    found = [unmixing.coherence(shuffled, "1", denoiser, rng) for _ in range(4)]
    assert not unmixing.whole(found)


def test_values_that_only_the_shuffle_hides_are_reassembled() -> None:
    """Two sites, no noise, templates near the truth: a parameter shuffle alone is no protection."""
    rng = np.random.default_rng(3)
    aux, _ = low_rank(200)
    rows, _ = low_rank(2, seed=5)
    denoiser = replace(learn(aux, [seen_of(rows, ("", ""))]), noise={"": 1e-6})
    shuffled = rows.copy()
    parameter.shuffle(shuffled, b"k" * 32)
    choice = unmixing.reassemble(shuffled, "", denoiser, (rows + rng.normal(0, 0.01, rows.shape)).astype(np.float32))
    right = np.take_along_axis(shuffled, choice, axis=0) == rows
    assert right.mean() > 0.95


@pytest.mark.parametrize(("others", "fraction", "cosine"), [(1, 0.95, 0.93), (4, 0.81, 0.74)])
def test_a_merged_bucket_is_unmixed_by_its_variances_and_a_levelled_one_is_not(
    others: int, fraction: float, cosine: float
) -> None:
    """The smallest value is that of the site with epsilon 8 among sites with 0.5; expected figures: exact Gaussians."""
    size, keys = 100_000, iter(range(100))
    budgets = [8.0] + [0.5] * others

    def rows(level: bool) -> NDArray[np.float32]:
        made = []
        for epsilon in budgets:
            key = next(keys).to_bytes(32, "big")
            noisy = ldp.privatise(np.zeros(size, np.float32), 1.0, epsilon, DELTA, key)
            lack = ldp.missing(1.0, epsilon, 0.5, DELTA) if level else 0.0
            made.append(noisy + lack * np.random.default_rng(next(keys)).standard_normal(size).astype(np.float32))
        return np.stack(made)

    for level in (False, True):
        sent = rows(level)
        rows_seen, sources = traced(sent, parameter.shuffle, b"s" * 32)
        choice = unmixing.least_noisy(rows_seen)[0]
        right = sources[choice, np.arange(size)] == 0
        values = rows_seen[choice, np.arange(size)]
        found = float(values @ sent[0] / np.linalg.norm(values) / np.linalg.norm(sent[0]))
        if level:
            assert right.mean() == pytest.approx(1 / len(budgets), abs=0.01)
        else:
            assert right.mean() == pytest.approx(fraction, abs=0.01)
            assert found == pytest.approx(cosine, abs=0.01)


Shuffle = Callable[[NDArray[np.float32], bytes], None]


def traced(sent: NDArray[np.float32], shuffle: Shuffle, key: bytes) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """These updates after a shuffle, and the source of every value."""
    rows, numbers = sent.copy(), as_received(sent).astype(np.float32)
    shuffle(rows, key)
    shuffle(numbers, key)
    return rows, numbers.astype(np.int16)


def test_the_truth_traces_every_value_even_among_equal_ones_and_with_topped_up_noise() -> None:
    sent = np.random.default_rng(0).normal(size=(5, 500)).astype(np.float32)
    sent[:, :100] = 0
    tops = (TopUp(2.0, b"t" * 32), TopUp(0.0, b"u" * 32))
    sets = (MixingSet((3, 0), b"a" * 32, tops), MixingSet((1, 2, 4), b"b" * 32))
    job = Job("parameter", 5, 500, (500,), sets)
    rows = sent.copy()
    mix(rows, job)
    sources, topped = mixed(Job.from_json(job.to_json()), sent)
    assert np.array_equal(np.take_along_axis(topped, sources.astype(np.int64), axis=0), rows)
    assert set(np.unique(sources[:2])) == {0, 3}
    assert 0.3 < (sources[2:, :100] == np.array([[1], [2], [4]])).mean() < 0.37  # ties are broken at random


# The whole attack on recorded runs


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paper's matrix at its reduced size: run, attacked and kept, with the user's command."""
    folder = tmp_path_factory.mktemp("audit")
    said = json_of(cli("audit", PAPER, "--reduced", "--out", folder, "--keep-runs", "--json", timeout=280, whole=True))
    assert said["failures"] == []
    return folder


def measures(audited: Path, cell: str) -> dict[str, dict[str, float]]:
    records = [json.loads(path.read_text()) for path in (audited / "cells").iterdir()]
    found: dict[str, dict[str, float]] = next(r for r in records if r["cell"] == cell)["measures"]["privacy-inference"]
    return found


@pytest.fixture(scope="module")
def run_dir(audited: Path) -> Path:
    """The transcript of the unprotected run."""
    return next((audited / "runs").glob("no-defence*/*/manifest.json")).parent


@pytest.fixture(scope="module")
def knowledge(run_dir: Path) -> Knowledge:
    return knowledge_of(Federation.model_validate(open_run(run_dir).manifest["config"]), None, {"auxiliary"})


# How far above chance each measure must be when nothing protects the updates.
BEATEN = {
    "cossim": 0.5,
    "surrogate_accuracy": 0.2,
    "ari": 0.1,
    "linkage": 0.5,
    "linkage_raw": 0.5,
    "reassigned": 0.5,
    "presence": 0.1,
    "bucket_attribute": 0.05,
    "linear_separability": 0.04,
}


def test_every_measure_beats_chance_without_protection(audited: Path) -> None:
    found = measures(audited, "no-defence")
    beaten = {name: found[name]["value"] - found[name]["chance"] for name in BEATEN}
    assert all(beaten[name] > least for name, least in BEATEN.items()), beaten


def test_intrashuffler_with_noise_reveals_little_about_single_sites(audited: Path) -> None:
    found = measures(audited, "intra")
    for name in ("surrogate_accuracy", "reassigned", "ari"):
        assert abs(found[name]["value"] - found[name]["chance"]) < 0.12, name
    # Four sites have the same label, so the label alone links one update in four.
    assert found["linkage"]["value"] < 0.3 < 0.7 < measures(audited, "no-defence")["linkage"]["value"]
    assert found["cossim"]["value"] < 0.4 * measures(audited, "no-defence")["cossim"]["value"]


def planted(run_dir: Path, shuffle: Shuffle, by_label: bool) -> tuple[list[Observation], Known]:
    """The rows of the unprotected run after our own shuffle, of all rows or within each label; and its truth.

    A run without noise has no labels: they are planted too, five budgets in turn.
    """
    run = open_run(run_dir)
    seen, after, rounds = observe(run.view("server")), [], []
    truth = Truth(run)
    for plain in seen:
        known = truth.round(plain.round)
        labels = tuple(f"{BUDGETS[site % 5]:g}" for site in known.sites[known.owners])
        one = replace(plain, tiers=labels) if by_label else plain
        rows, sources = one.rows.copy(), as_received(one.rows).astype(np.int16)
        for number, bucket in enumerate(one.buckets()):
            key = one.round.to_bytes(31, "big") + bytes([number])
            rows[bucket], places = traced(one.rows[bucket], shuffle, key)
            sources[bucket] = bucket[places]
        after.append(replace(one, rows=rows))
        rounds.append(replace(truth.round(one.round), sources=sources, owners=owners_of(sources)))
    return after, Known(truth.federation, rounds, truth.labels, truth.groups)


def test_a_planted_weak_shuffle_is_broken(run_dir: Path, knowledge: Knowledge) -> None:
    """One permutation for all coordinates: rows stay whole, in another order, and nothing is protected."""
    seen, truth = planted(run_dir, model.shuffle, by_label=False)
    found = judge(examine(seen, knowledge), truth).measures
    for name in ("cossim", "linkage", "surrogate_accuracy", "ari", "reassigned", "presence", "bucket_attribute"):
        assert found[name].value > found[name].chance + 0.05, name


def test_rows_mixed_from_the_whole_cohort_link_to_nobody(run_dir: Path, knowledge: Knowledge) -> None:
    seen, truth = planted(run_dir, parameter.shuffle, by_label=False)
    found = judge(examine(seen, knowledge), truth).measures
    assert abs(found["linkage"].value - found["linkage"].chance) < 0.1
    assert found["surrogate_accuracy"].value < found["surrogate_accuracy"].chance + 0.1
    assert found["cossim"].value < 0.4  # at least 60 % less than the whole rows' 0.99


def test_buckets_of_two_hide_little_and_their_sums_nothing(audited: Path, run_dir: Path, knowledge: Knowledge) -> None:
    """Four sites share a label and two of them are in a round: mixed rows still resemble them."""
    seen, truth = planted(run_dir, parameter.shuffle, by_label=True)
    found = judge(examine(seen, knowledge), truth).measures
    before = measures(audited, "no-defence")
    assert found["linkage"].chance + 0.1 < found["linkage"].value < 0.7 * before["linkage"]["value"]
    assert found["bucket_attribute"].value == pytest.approx(before["bucket_attribute"]["value"], abs=0.05)


def test_the_command_prints_and_keeps_the_scores(run_dir: Path) -> None:
    said = json_of(cli("attack", run_dir, "privacy-inference", "--seeds", "2", "--json"))
    found = said["attacks"]["privacy-inference"]
    assert found["seeds"] == 2
    assert found["measures"]["linkage"]["half_interval"] is not None
    assert found["observers"] == ["server"]
    assert json.loads((run_dir / "attacks" / "privacy-inference.json").read_text()) == found


def test_the_report_has_our_number_and_the_papers(audited: Path) -> None:
    report = (audited / "report.md").read_text()
    found = measures(audited, "no-defence")["surrogate_accuracy"]["value"]
    assert f"{found:.3f}" in report
    assert "0.780 ± 0.030" in report
    assert (audited / "figures" / "table-2.svg").exists()


# Bad input


def test_what_cannot_be_attacked_is_refused_with_the_reason(run_dir: Path, tmp_path: Path) -> None:
    for words, reason in (
        ((run_dir, "no-such-attack"), "'no-such-attack' is unknown; use one of inversion, membership, "),
        ((tmp_path, "privacy-inference"), "not a run"),
        ((run_dir, "--seeds", "0"), "seeds: 0 is not positive"),
        ((run_dir, "--observer", "server,aggregator-0"), "no view of 'aggregator-0'; use server, or record a run"),
    ):
        done = cli("attack", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert reason in done.stderr


def test_a_run_without_truth_is_refused(run_dir: Path) -> None:
    run = open_run(run_dir)
    config = Federation.model_validate(run.manifest["config"]).model_dump(mode="json")
    closed = replace(run, manifest={**run.manifest, "config": {**config, "audit": False}})
    with pytest.raises(Exception, match="record the run with `audit: true`"):
        Truth(closed)


def test_a_data_set_without_auxiliary_data_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)
    task = yaml.safe_load("{dataset: heart-disease, model: mlp, partition: {kind: by-site}}")
    federation = Federation.model_validate({"sites": 4, "task": task})
    with pytest.raises(Exception, match="auxiliary data"):
        _ = knowledge_of(federation, None, {"auxiliary"}).auxiliary


def test_an_attack_that_does_not_declare_auxiliary_data_gets_none() -> None:
    with pytest.raises(FederationError, match="add 'auxiliary' to its needs"):
        _ = knowledge_of(Federation.model_validate({"sites": 4}), None, frozenset()).auxiliary


def test_each_data_set_provides_its_own_attacker_facts() -> None:
    digits = Federation.model_validate({"sites": 4})
    assert facts_of(digits).groups(digits).tolist() == [0, 1, 2, 3]
    assert facts_of(digits).auxiliary(digits, None, 3).labels.shape == (96,)
    task = {"dataset": "lcl", "model": "lstm", "partition": {"kind": "by-site"}}
    households = Federation.model_validate({"sites": 42, "task": task})
    assert facts_of(households).groups(households).tolist() == [*range(40), 0, 1]
    root = Path(attacks.__file__).parent
    assert not [path for path in root.rglob("*.py") if "lcl" in path.read_text().lower()]


def test_the_denoiser_estimates_noise_per_label() -> None:
    aux, _ = low_rank(100)
    rows = np.random.default_rng(0).normal(size=(4, 2000)).astype(np.float32)
    rows[2:] *= 3
    found: Denoiser = learn(aux, [seen_of(rows, ("8", "8", "0.5", "0.5"))])
    assert found.noise["8"] == pytest.approx(1, rel=0.1)
    assert found.noise["0.5"] == pytest.approx(9, rel=0.1)
