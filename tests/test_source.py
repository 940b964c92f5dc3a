"""Source inference: its parts against the literal algorithms, and the whole attack on planted rounds."""

from __future__ import annotations

import colorsys
import itertools
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from torch import nn

from attacks.common.knowledge import Knowledge
from attacks.common.measure import Measure
from attacks.common.targets import MOST, SHADOW, alike, shadows, targets
from attacks.source import noise, parameter, residues, sums
from attacks.source.reader import Reader
from attacks.source.rebuild import fitted
from attacks.source.run import Findings, inspect, lowest, mixtures
from attacks.source.score import by_round, relabelled, score
from attacks.source.seen import Bucket, Sight, buckets
from fl_privacy.config import Federation
from fl_privacy.mix import shares
from fl_privacy.rns import residues as encoded
from fl_privacy.rns.coding import Modular
from fl_privacy.steps.encode import rns
from fl_privacy.tasks.canaries import chosen
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.workload import Workload
from fl_privacy.vector import Vector
from profiles import examples

# R_P


class Case:
    """A small network in float64, the last layers of several clients, and a shadow set."""

    def __init__(self, seed: int, clients: int = 4, records: int = 12, inputs: int = 5, classes: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.model = nn.Sequential(nn.Linear(4, inputs), nn.ReLU(), nn.Linear(inputs, classes)).double()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(torch.from_numpy(rng.normal(size=tuple(weight.shape))))
        self.x = torch.from_numpy(rng.normal(size=(records, 4)))
        self.y = torch.from_numpy(rng.integers(classes, size=records))
        self.columns = rng.normal(size=(clients, classes, inputs + 1))  # the bias as the last input
        self.set_last(self.columns.mean(axis=0))

    def set_last(self, weights: NDArray[np.float64]) -> None:
        with torch.no_grad():
            self.model[2].weight.copy_(torch.from_numpy(weights[:, :-1]))
            self.model[2].bias.copy_(torch.from_numpy(weights[:, -1]))

    @torch.no_grad()
    def right(self) -> int:
        return int((self.model(self.x).argmax(dim=1) == self.y).sum())

    @torch.no_grad()
    def log_likelihood(self) -> float:
        return -float(nn.functional.cross_entropy(self.model(self.x), self.y, reduction="sum"))

    def replaced(self, place: tuple[int, int], value: float) -> None:
        """REP of Algorithm 6."""
        weights = self.columns.mean(axis=0)
        weights[place] = value
        self.set_last(weights)

    @property
    def shadow(self) -> parameter.Shadow:
        self.set_last(self.columns.mean(axis=0))
        with torch.no_grad():
            hidden = self.model[:2](self.x).numpy()
        inputs = np.column_stack([hidden, np.ones(len(hidden))])
        return parameter.Shadow(inputs, inputs @ self.columns.mean(axis=0).T, self.y.numpy())

    @property
    def steps(self) -> NDArray[np.float64]:
        return np.asarray(self.columns - self.columns.mean(axis=0))


def literal(case: Case) -> NDArray[np.int64]:
    """Algorithm 5 as it is printed: a forward pass for every client's value of every weight."""
    found = np.zeros(case.columns.shape[1:], np.int64)
    for place in np.ndindex(*found.shape):
        case.replaced(place, case.columns[0][place])
        best = case.right()
        for client in range(1, len(case.columns)):
            case.replaced(place, case.columns[client][place])
            if case.right() > best:
                best, found[place] = case.right(), client
    return found


@given(seed=st.integers(0, 2**32 - 1))
@examples(20)
def test_r_p_without_forward_passes_chooses_what_algorithm_5_does(seed: int) -> None:
    case = Case(seed)
    assert np.array_equal(parameter.chosen(parameter.correct(case.shadow, case.steps)), literal(case))


def test_equal_logits_count_as_they_do_for_argmax() -> None:
    """Steps that make two logits exactly equal: the class that comes first is the answer."""
    shadow = parameter.Shadow(np.ones((2, 1)), np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([0, 1]))
    steps = np.array([[[1.0], [1.0]], [[0.0], [0.0]]])  # the first candidate makes both logits 2 in one record
    assert parameter.correct(shadow, steps).tolist() == [[[1], [0]], [[0], [0]]]


@given(seed=st.integers(0, 2**32 - 1))
@examples(10)
def test_gains_are_differences_of_log_likelihoods(seed: int) -> None:
    case = Case(seed)
    gains = parameter.gains(case.shadow, case.steps)
    for place in np.ndindex(*gains.shape[1:]):
        exact = []
        for client in range(len(case.columns)):
            case.replaced(place, case.columns[client][place])
            exact.append(case.log_likelihood())
        assert np.allclose(gains[(slice(None), *place)] - gains[(0, *place)], np.array(exact) - exact[0])


def test_records_are_counted_alike_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, records=40)
    whole = parameter.correct(case.shadow, case.steps), parameter.gains(case.shadow, case.steps)
    monkeypatch.setattr(parameter, "MOST_NUMBERS", 70)
    pieces = parameter.correct(case.shadow, case.steps), parameter.gains(case.shadow, case.steps)
    assert np.array_equal(whole[0], pieces[0])
    assert np.allclose(whole[1], pieces[1])


@given(seed=st.integers(0, 2**32 - 1), values=st.integers(1, 4))
@examples(20)
def test_a_column_is_assigned_as_well_as_any_permutation_does(seed: int, values: int) -> None:
    scores = np.random.default_rng(seed).normal(size=(4, values, 3))
    found = parameter.assigned(scores)
    copies = -(-4 // values)
    for column in range(3):
        own = sum(scores[x, found[x, column], column] for x in range(4))
        ways = itertools.permutations([value for value in range(values) for _ in range(copies)], 4)
        assert own == pytest.approx(max(sum(scores[x, way[x], column] for x in range(4)) for way in ways))


@given(seed=st.integers(0, 2**32 - 1))
@examples(20)
def test_sorted_values_fit_predictions_as_well_as_any_permutation_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, predicted = (rng.normal(size=(4, 6)).astype(np.float32) for _ in range(2))
    found = fitted(rows, predicted, "parameter", ())
    assert np.array_equal(np.sort(found, axis=0), np.sort(rows, axis=0))
    for column in range(6):
        errors = [
            np.square(rows[list(way), column] - predicted[:, column]).sum() for way in itertools.permutations(range(4))
        ]
        assert np.square(found[:, column] - predicted[:, column]).sum() == pytest.approx(min(errors), rel=1e-5)


@pytest.mark.parametrize("level", ["model", "layer", "parameter"])
def test_good_predictions_undo_every_shuffle(level: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 40)).astype(np.float32)
    parts = {"model": [slice(0, 40)], "layer": [slice(0, 10), slice(10, 40)], "parameter": ()}[level]
    mixed = rng.permuted(rows, axis=0)
    if parts:
        for part in parts:
            mixed[:, part] = rows[rng.permutation(5), part]
    near = rows + rng.normal(0, 1e-6, rows.shape).astype(np.float32)
    assert np.array_equal(fitted(mixed, near, level, parts), rows)


# Sums


@given(seed=st.integers(0, 2**32 - 1))
@examples(20)
def test_constant_updates_are_found_from_sums_over_different_cohorts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(5, 30))
    cohorts = [cohort for size in (2, 3) for cohort in itertools.combinations(range(5), size)]
    means = [parts[list(cohort)].mean(axis=0) for cohort in cohorts]
    units = [(mean / np.linalg.norm(mean)).astype(np.float32) for mean in means]
    # A site's part is constant in units of the round's mean, so every mean has length 1 here.
    scales = np.array([np.linalg.norm(mean) for mean in means])
    found = sums.disaggregated(units, cohorts, 5)
    exact = np.linalg.lstsq(_members(cohorts, 5), np.stack(means) / scales[:, None], rcond=None)[0]
    assert np.allclose(found, exact, atol=1e-4)
    equal = sums.disaggregated([mean.astype(np.float32) for mean in means[:1]] * 3, [range(5)] * 3, 5)
    assert np.allclose(equal, equal[0], atol=1e-6)  # one cohort: nothing tells its members apart


def _members(cohorts: list[tuple[int, ...]], sites: int) -> NDArray[np.float64]:
    return np.array([[1 / len(cohort) if site in cohort else 0 for site in range(sites)] for cohort in cohorts])


# Shadow sets


def test_hues_turn_as_in_hsv_and_noise_keeps_the_form() -> None:
    draw = torch.Generator().manual_seed(0)
    images, turns = torch.rand(3, 3, 4, 4, generator=draw), torch.tensor([[0.07], [0.0], [-0.05]])
    made = noise.turned_hue(images, turns)
    for image, at_row, at_column in np.ndindex(3, 4, 4):
        hue, saturation, value = colorsys.rgb_to_hsv(*images[image, :, at_row, at_column].tolist())
        expected = colorsys.hsv_to_rgb((hue + float(turns[image, 0])) % 1, saturation, value)
        assert np.allclose(made[image, :, at_row, at_column], expected, atol=1e-5)
    data = Dataset(images.numpy(), np.zeros(3, np.int64))
    for name in noise.NOISES:
        changed = noise.noisy(data, name, 1)
        assert changed.x.shape == data.x.shape
        assert not np.allclose(changed.x, data.x, atol=1e-3), name
        assert np.array_equal(noise.noisy(data, name, 1).x, changed.x)
        assert changed.x.min() >= 0 <= 1 >= changed.x.max() - 1e-6
    assert torch.allclose(noise.rotated(images, draw, 0.0), images, atol=1e-5)
    assert torch.allclose(noise.coloured(0.0)(images, draw), images, atol=1e-5)


FEDERATION = Federation.model_validate(
    {
        "name": "planted",
        "seed": 1,
        "sites": 4,
        "route": {"kind": "server"},
        "task": {"partition": {"kind": "dirichlet", "alpha": 0.1}},
    }
)


def test_targets_are_as_many_of_every_site_and_shadow_sets_are_like_it_and_held_out() -> None:
    work = Workload(FEDERATION)
    asked, owners = targets(FEDERATION, None)
    parts = [work.site_data(name) for name in FEDERATION.site_names]
    assert np.bincount(owners).tolist() == [min(MOST, *map(len, parts))] * 4
    for row, owner in zip(asked.x, owners, strict=True):
        assert (parts[owner].x == row).all(axis=(1, 2, 3)).any()
    for (name, shadow), own in zip(shadows(FEDERATION, None).items(), parts, strict=True):
        assert name in FEDERATION.site_names
        assert 1 <= len(shadow) <= max(1, round(SHADOW * len(own)))
        assert set(shadow.y.tolist()) <= set(own.y.tolist())
        for row in shadow.x:
            assert (work.test.x == row).all(axis=(1, 2, 3)).any()


def test_canaries_are_not_asked_about() -> None:
    federation = Federation.model_validate({**FEDERATION.model_dump(), "audit": True, "canaries": {"fraction": 0.5}})
    work, (asked, owners) = Workload(federation), targets(federation, None)
    for number, name in enumerate(federation.site_names):
        data = work.site_data(name)
        hidden = data.x[chosen(len(data), 0.5, federation.seed, name)]
        for row in asked.x[owners == number]:
            assert (hidden == row).all(axis=(1, 2, 3)).sum() <= (data.x == row).all(axis=(1, 2, 3)).sum() - 1


def test_a_class_that_nobody_holds_out_leaves_fewer_records() -> None:
    rng = np.random.default_rng(0)
    own = Dataset(np.zeros((40, 1), np.float32), np.repeat([0, 1], 20))
    others = Dataset(np.zeros((5, 1), np.float32), np.array([1, 2, 2, 1, 2]))
    assert set(others.y[alike(own, others, rng)].tolist()) == {1} or len(alike(own, others, rng)) == 1


# Guesses


def test_equal_losses_are_broken_at_random() -> None:
    rng = np.random.default_rng(0)
    found = lowest(np.tile([0.5, 0.0, 0.0], (3000, 1)), rng)
    assert set(found.tolist()) == {1, 2}
    assert abs((found == 1).mean() - 0.5) < 4 * 0.5 / 3000**0.5


def test_the_best_of_many_rounds_has_its_own_chance() -> None:
    """Guesses that know nothing: their best round is above 1/n, and so is the best round of exchanged owners."""
    rng = np.random.default_rng(0)
    owners, found, chance = np.repeat(np.arange(5), 20), [], []
    for _ in range(40):
        guesses = rng.integers(5, size=(20, 100)).astype(np.int16)
        best = by_round(guesses, relabelled(owners, 50, rng), np.ones((20, 5), bool)).max(axis=0)
        found.append(best[0])
        chance.append(best[1:].mean())
    assert np.mean(chance) > 0.25 > 1 / 5
    assert abs(np.mean(found) - np.mean(chance)) < 4 * np.std(found) / 40**0.5


def test_only_records_of_those_who_took_part_count() -> None:
    owners, present = np.repeat(np.arange(4), 3), np.array([[True, True, False, False]])
    right = np.where(owners < 2, owners, 0)[None].astype(np.int16)
    assert by_round(right, relabelled(owners, 0, np.random.default_rng(0)), present)[0, 0] == 1.0


# The whole attack on planted rounds


class Kept:
    """The models before every round."""

    def __init__(self) -> None:
        self.models = dict[int, Vector]()

    def before(self, round: int) -> Vector:
        return self.models[round]


class Planted:
    """Rounds of a federation, trained here."""

    def __init__(self, federation: Federation, rounds: int) -> None:
        self.federation, self.work, self.kept = federation, Workload(federation), Kept()
        self.sights, model, rng = list[Sight](), self.work.initial.copy(), np.random.default_rng(0)
        for number in range(1, rounds + 1):
            names = federation.site_names
            cohort = [names[i] for i in sorted(rng.choice(len(names), federation.cohort, replace=False).tolist())]
            named = {n: self.work.update(model, self.work.site_data(n), n, number).copy() for n in cohort}
            mean = np.mean(list(named.values()), axis=0, dtype=np.float32)
            self.kept.models[number] = model
            self.sights.append(Sight(number, model, tuple(cohort), mean, named=named))
            model = model + mean

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        return targets(self.federation, None).owners

    def found(self, sights: list[Sight]) -> tuple[Findings, dict[str, Measure]]:
        federation = self.federation
        knowledge = Knowledge(
            federation,
            models=self.kept,  # type: ignore[arg-type]
            targets=lambda: targets(federation, None).records,
            shadows=lambda: shadows(federation, None),
        )
        findings = inspect(sights, Reader(federation), knowledge, 0)
        return findings, dict(score(findings, self).measures)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def planted() -> Planted:
    return Planted(FEDERATION, 3)


def test_names_give_the_source_away_and_shuffles_are_undone(planted: Planted) -> None:
    findings, found = planted.found(planted.sights)
    for method in ("source", "rm", "rl", "rp", "rm_joint", "rl_joint", "rp_joint", "rp_likelihood", "rp_all"):
        assert found[f"{method}_best"].value > found[f"{method}_best"].chance + 0.2, method
        assert found[f"{method}_best_p"].value < 0.01, method
    assert found["source_best"].value >= found["rp_best"].value
    assert set(found["rm_best"].groups) >= {"1 %", "0.5 %", "rotation", "upside down", "colour 0.4"}
    assert findings.simulated == {name for name in findings.guesses if name.startswith("r")}
    assert found["any_strongest"].value >= found["source_best"].value
    # One cohort in all rounds: sums say nothing.
    assert abs(found["sums_overall"].value - 1 / 4) < found["sums_overall_interval"].value


def test_a_joint_assignment_undoes_a_shuffle_of_models_exactly(planted: Planted) -> None:
    """Then every record is attributed as it is by names."""
    findings, _ = planted.found(planted.sights)
    assert np.array_equal(findings.guesses["rm_joint"], findings.guesses["source"])


def test_rows_without_names_are_attacked_as_they_came(planted: Planted) -> None:
    sights = []
    for sight in planted.sights:
        (_, made), *_ = mixtures(sight, "model", Reader(planted.federation), 5)
        sights.append(made)
    findings, found = planted.found(sights)
    assert not findings.simulated
    assert {"source", "rl", "rp"}.isdisjoint(findings.guesses)
    assert found["any_strongest"].value > found["any_strongest"].chance + 0.2


def test_only_what_updates_say_counts_as_an_attack(planted: Planted) -> None:
    """Models of sites that were exchanged among them: attribution by name falls, and `known` stays what it is."""
    turned = []
    for sight in planted.sights:
        assert sight.named is not None
        names = list(sight.named)
        exchanged = dict(zip(names, [sight.named[name] for name in [*names[1:], names[0]]], strict=True))
        turned.append(Sight(sight.round, sight.model, sight.sites, sight.mean, named=exchanged))
    _, before = planted.found(planted.sights)
    _, after = planted.found(turned)
    assert after["source_mean"].value < 0.25 < before["source_mean"].value
    assert after["known_mean"] == before["known_mean"]


def test_sums_of_changing_cohorts_give_sources_away() -> None:
    federation = Federation.model_validate({**FEDERATION.model_dump(), "cohort": 2, "quorum": 2})
    found = Planted(federation, 12)
    sights = [Sight(one.round, one.model, one.sites, one.mean) for one in found.sights]
    findings, measures = found.found(sights)
    assert set(findings.guesses) == {"known", "sums"}
    assert measures["sums_best_p"].value < 0.01
    assert measures["sums_overall"].value > measures["sums_overall"].chance + measures["sums_overall_interval"].value


def test_rows_of_a_label_belong_to_the_sites_whose_budget_leads_there() -> None:
    sites = [{"name": f"s{i}", "epsilon": epsilon} for i, epsilon in enumerate((1, 1, 8, 4))]
    federation = Federation.model_validate({"name": "x", "sites": sites, "privatise": {"kind": "ldp", "clip": 1.0}})
    found = buckets(federation, federation.site_names, ["1", "1", "4", "4"])
    assert [(b.rows.tolist(), b.sites) for b in found] == [([0, 1], ("s0", "s1")), ([2, 3], ("s2", "s3"))]
    assert isinstance(found[0], Bucket)


# Sums of residues


def residue_sums(values: NDArray[np.int64], moduli: tuple[int, ...], unreduced: set[int]) -> NDArray[np.uint64]:
    rows = [(values % m).sum(axis=0) % (10**9 if j in unreduced else m) for j, m in enumerate(moduli)]
    return np.stack(rows).astype(np.uint64)


def error_of(values: NDArray[np.int64], unreduced: set[int]) -> float:
    moduli, rng = (3, 4, 5, 7), np.random.default_rng(1)
    sums_seen = residue_sums(values, moduli, unreduced)
    predicted = values + rng.normal(0, 6, values.shape)
    reduced = residues.is_reduced(sums_seen, moduli)
    found = residues.estimated(sums_seen, predicted, moduli, 9, reduced)
    return float(np.square(found - values).mean())


def test_unreduced_sums_of_residues_tell_values_that_reduced_ones_do_not() -> None:
    """The planted failure: one residue that is not reduced. It helps, and all of them help more."""
    values = np.random.default_rng(0).integers(-9, 10, size=(2, 3000))
    none, one, every = (error_of(values, unreduced) for unreduced in (set(), {2}, {0, 1, 2, 3}))
    assert every < 0.85 * none
    assert one < 0.995 * none  # a modulus alone says little
    assert residues.is_reduced(residue_sums(values, (3, 4, 5, 7), {1}), (3, 4, 5, 7)) == [True, False, True, True]


def test_published_sums_gain_on_sums_and_carry_safe_ones_gain_nothing(planted: Planted) -> None:
    gains = {}
    for form in ("published", "carry-safe"):
        federation = Federation.model_validate(
            {
                **planted.federation.model_dump(),
                "sites": 4,
                "route": {"kind": "mixes", "mixes": 1, "trust": "trusted", "n_min": 2},
                "encode": {"kind": "rns", "r": 2, "range": 1.0, "form": form},
            }
        )
        sights = []
        for sight in planted.sights:
            assert sight.named is not None
            coding = federation.coding
            assert isinstance(coding, Modular)
            values = np.stack([np.trunc(u.astype(np.float64).clip(-0.99, 0.99) * 100) for u in sight.named.values()])
            moduli = coding.moduli
            every = set(range(len(moduli))) if form == "published" else set[int]()
            seen = residue_sums(values.astype(np.int64), moduli, every)
            sights.append(Sight(sight.round, sight.model, sight.sites, sight.mean, sums=seen))
        found = Planted.__new__(Planted)
        found.federation, found.kept = federation, planted.kept
        findings, measures = found.found(sights)
        gains[form] = measures["rns_gain"], measures["rns_gain_p"].value, findings
    safe, p, findings = gains["carry-safe"]
    assert np.array_equal(findings.guesses["rns"], findings.guesses["rns_control"])
    assert (safe.value, p) == (safe.chance, 1.0)
    assert not np.array_equal(gains["published"][2].guesses["rns"], gains["published"][2].guesses["rns_control"])


def shared(sight: Sight, mixes: int, draw: int = 0) -> Sight:
    """A round as these of three mixes see it: what their shares of every update add up to."""
    assert sight.named is not None
    moduli, seen = rns.moduli(len(sight.named), 4), dict[str, Vector]()
    for site, (name, update) in enumerate(sight.named.items()):
        whole = rns.encode(np.clip(update, -0.99, 0.99), moduli, 4)
        seeds, data = shares.split(whole, moduli, 3, bytes([draw, site]) * 16)
        parts = [*(shares.expanded([seed], moduli, update.size) for seed in seeds), data]
        integers = encoded.decode(shares.added(parts[-mixes:], moduli), moduli)
        seen[name] = (integers / 10.0**4).astype(np.float32)
    return Sight(sight.round, sight.model, sight.sites, sight.mean, named=seen)


def test_all_mixes_but_one_learn_no_source_and_all_of_them_learn_every_one(planted: Planted) -> None:
    """Noise attributes whole classes at random, so the mean over many draws of it is compared."""
    first = planted.sights[0]
    two = [planted.found([shared(first, 2, draw)])[1]["source_mean"].value for draw in range(8)]
    assert abs(np.mean(two) - 1 / 4) < 4 * np.std(two, ddof=1) / len(two) ** 0.5 + 0.01
    _, three = planted.found([shared(first, 3)])
    assert three["source_mean"].value > max(two) + 0.1
