"""Counts of evaluation: they add up exactly, and say of a model what its outputs say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, log_loss, roc_auc_score

from fl_privacy.dp import gaussian
from fl_privacy.dp.counts import BOUNDS, Noise, bounded
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.scores.form import LONGEST, MOST_CLASSES, Form, Tally
from fl_privacy.scores.metrics import scores
from fl_privacy.scores.shares import added, split
from fl_privacy.scores.tally import log_odds, score_bins, tally
from profiles import examples

Floats = NDArray[np.float64]


def cross_entropy(logits: Floats, labels: NDArray[np.int64]) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]


def classified(seed: int, records: int, classes: int, scale: float = 2.0) -> tuple[Floats, NDArray[np.int64]]:
    """Logits of a model that is right more often than not."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=records)
    logits = rng.normal(size=(records, classes))
    logits[np.arange(records), labels] += 1.0
    return scale * logits, labels


def counted(form: Form, logits: Floats, labels: NDArray[np.int64]) -> Tally:
    return tally(form, logits, labels, cross_entropy(logits, labels))


def forecast(form: Form, outputs: Floats, values: Floats) -> Tally:
    return tally(form, outputs[:, None], values, (outputs - values) ** 2)


@given(st.integers(0, 2**32), st.integers(2, 12), st.lists(st.integers(0, 40), min_size=1, max_size=6))
@examples(50)
def test_the_counts_of_all_sites_add_up_to_those_of_the_pooled_records(
    seed: int, classes: int, sizes: list[int]
) -> None:
    form, (logits, labels) = Form(classes), classified(seed, sum(sizes), classes)
    cuts = np.cumsum(sizes)[:-1]
    sites = [counted(form, *site) for site in zip(np.split(logits, cuts), np.split(labels, cuts), strict=True)]
    total = added([site.vector for site in sites], form.length)
    assert np.array_equal(total, counted(form, logits, labels).vector)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30), st.integers(0, 30))
def test_forecasts_add_up_too_and_give_rmse_and_mae(errors: list[float], cut: int) -> None:
    form, values = Form(0), np.zeros(len(errors))
    outputs = np.array(errors)
    pooled = forecast(form, outputs, values)
    halves = [forecast(form, part, np.zeros(len(part))) for part in (outputs[:cut], outputs[cut:])]
    assert np.array_equal(added([half.vector for half in halves], form.length), pooled.vector)
    found = scores(Tally.of(form, pooled.vector))
    step = 2.0**-32  # each record is rounded down to it
    assert found.rmse == pytest.approx(math.sqrt(np.mean(outputs**2)), rel=1e-9, abs=math.sqrt(step))
    assert found.mae == pytest.approx(outputs.mean(), rel=1e-9, abs=step)
    assert found.loss == pytest.approx(np.mean(outputs**2), rel=1e-9, abs=step)
    assert (found.accuracy, found.records) == (None, len(errors))


@given(st.integers(0, 2**32), st.integers(2, 12))
@examples(30)
def test_measures_are_those_of_scikit_learn(seed: int, classes: int) -> None:
    logits, labels = classified(seed, 400, classes)
    labels[:classes] = np.arange(classes)  # every class is there
    found = scores(counted(Form(classes), logits, labels))
    odds, predicted = np.exp(logits), logits.argmax(axis=1)
    probabilities = odds / odds.sum(axis=1, keepdims=True)
    assert found.accuracy == np.mean(predicted == labels)
    assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert found.loss == pytest.approx(log_loss(labels, probabilities, labels=range(classes)), abs=1e-6)
    assert found.confusion == confusion_matrix(labels, predicted, labels=range(classes)).tolist()
    assert found.ece == pytest.approx(calibration_error(probabilities, labels), abs=1e-5)


def calibration_error(probabilities: Floats, labels: NDArray[np.int64], bins: int = 15) -> float:
    """Guo et al. 2017, Equation 3."""
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    return float(sum(abs((correct[which == b] - confidence[which == b]).sum()) for b in range(bins)) / len(labels))


def exact_auroc(form: Form, logits: Floats, labels: NDArray[np.int64]) -> float:
    odds = log_odds(logits)
    there = [c for c in form.scored if 0 < (labels == c).sum() < len(labels)]
    return float(np.mean([roc_auc_score(labels == c, odds[:, c]) for c in there]))


# How far apart a model's scores are (untrained, trained, saturated), and where they lie.
SPREADS = [(0.05, 0.0), (0.3, -2.0), (1.0, 0.0), (2.0, 3.0), (6.0, -5.0), (12.0, 0.0)]


@pytest.mark.parametrize(("scale", "offset"), SPREADS)
@pytest.mark.parametrize("records", [200, 5000])
def test_auroc_of_two_classes_is_within_0_005_of_the_exact_one(scale: float, offset: float, records: int) -> None:
    form = Form(2)
    for seed in range(5):
        logits, labels = classified(seed, records, 2, scale)
        logits[:, 1] += offset
        found = scores(counted(form, logits, labels)).auroc
        assert found == pytest.approx(exact_auroc(form, logits, labels), abs=0.005)


@pytest.mark.parametrize("classes", [3, 10, 100])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_auroc_of_many_classes_is_within_0_005_of_the_exact_one(classes: int, scale: float) -> None:
    form, (logits, labels) = Form(classes), classified(classes, 2000, classes, scale)
    assert scores(counted(form, logits, labels)).auroc == pytest.approx(exact_auroc(form, logits, labels), abs=0.005)


def test_auroc_is_never_off_by_more_than_half_the_pairs_that_share_a_bin() -> None:
    form, (logits, labels) = Form(2), classified(3, 500, 2, 1e-4)  # scores that hardly differ
    result = counted(form, logits, labels)
    other, own = result.block("scores")[0] / np.bincount(labels)[:, None]
    bound = float((own * other).sum()) / 2
    assert bound > 0.01
    assert scores(result).auroc == pytest.approx(exact_auroc(form, logits, labels), abs=bound)


def test_bins_keep_the_order_of_scores_up_to_the_largest() -> None:
    odds = np.array([-np.inf, -1e9, -50.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 50.0, 1e9, np.inf])
    for classes in (2, 10):
        bins = score_bins(Form(classes), odds)
        assert (np.diff(bins) >= 0).all()
        assert (bins[0], bins[-1]) == (0, Form(classes).bins - 1)


def test_log_odds_are_accurate_where_probabilities_round_to_one() -> None:
    logits = np.array([[80.0, 0.0, -3.0], [0.0, 0.0, 0.0]])
    expected = [[80 - math.log1p(math.exp(-3)), -80.0, -83.0], [-math.log(2)] * 3]
    np.testing.assert_allclose(log_odds(logits), expected, rtol=1e-12)


def test_one_output_is_the_score_of_the_second_class() -> None:
    logits, labels = classified(1, 50, 2)
    losses = cross_entropy(logits, labels)
    single = tally(Form(2), (logits[:, 1] - logits[:, 0])[:, None], labels, losses)
    assert scores(single) == scores(tally(Form(2), logits, labels, losses))


def test_with_very_many_classes_there_is_no_matrix_but_recall() -> None:
    classes = MOST_CLASSES + 100
    logits, labels = classified(5, 3000, classes, 8.0)
    found = scores(counted(Form(classes), logits, labels))
    assert (found.confusion, found.auroc) == (None, None)
    assert found.accuracy == np.mean(logits.argmax(axis=1) == labels)
    assert found.balanced_accuracy is not None
    assert max(Form(n).length for n in (0, 2, 10, MOST_CLASSES, classes)) <= LONGEST


@pytest.mark.parametrize(
    ("outputs", "labels", "said"),
    [
        (np.zeros((3, 4)), np.array([0, 1, 3]), "4 outputs for 3 classes"),
        (np.zeros((3, 3)), np.array([0, 1, 3]), "outside 0 to 2"),
        (np.zeros((3, 3)), np.array([0, 1, -1]), "outside 0 to 2"),
        (np.full((3, 3), np.nan), np.array([0, 1, 2]), "not finite"),
        (np.zeros((2, 3)), np.array([0, 1, 2]), "2 outputs, 3 labels"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(outputs: Floats, labels: NDArray[np.int64], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        tally(Form(3), outputs, labels, np.zeros(3))


def test_a_vector_of_another_length_or_type_is_refused() -> None:
    form = Form(3)
    for vector in (np.zeros(form.length + 1, np.uint64), np.zeros(form.length, np.int64)):
        with pytest.raises(ProtocolError):
            Tally.of(form, vector)


@given(st.integers(0, 2**32))
def test_whatever_a_sum_says_it_has_measures_or_none(seed: int) -> None:
    """A hostile site can spoil the sum, but not stop the server."""
    data = np.random.default_rng(seed).bytes(8 * Form(3).length)
    found = scores(Tally.of(Form(3), np.frombuffer(data, np.uint64)))
    assert found.accuracy is None or 0 <= found.accuracy <= 1
    assert found.auroc is None or 0 <= found.auroc <= 1
    assert scores(Tally.of(Form(0), np.frombuffer(data, np.uint64)[: Form(0).length].copy())) is not None


def test_sums_over_different_cohorts_tell_the_classes_of_every_site() -> None:
    """Why the manifest says so: no sum is of one site, and another model makes each."""
    rng, form = np.random.default_rng(0), Form(3)
    labels = [rng.integers(3, size=rng.integers(5, 60)) for _ in range(6)]
    cohorts = [rng.permutation(6)[:4] for _ in range(12)]
    sums = []
    for cohort in cohorts:
        logits = {site: rng.normal(size=(len(labels[site]), 3)) for site in cohort}
        total = added([counted(form, logits[site], labels[site]).vector for site in cohort], form.length)
        sums.append(Tally.of(form, total).block("classes").sum(axis=1))
    took_part = np.array([np.isin(np.arange(6), cohort) for cohort in cohorts], float)
    found = np.linalg.lstsq(took_part, np.array(sums, float), rcond=None)[0]
    assert np.array_equal(np.rint(found), [np.bincount(y, minlength=3) for y in labels])


# Shares


@given(st.integers(2, 7), st.integers(0, 2**32))
def test_shares_add_up_to_the_counts(parts: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 2**64, 99, np.uint64)
    assert np.array_equal(added(split(counts, parts, bytes(32)), counts.size), counts)


def test_all_shares_but_one_say_nothing_of_the_counts() -> None:
    """Of two vectors of counts, any two of three shares are the same but for a shift that the key decides."""
    first, second = np.zeros(1000, np.uint64), np.arange(1000, dtype=np.uint64)
    for key in (bytes(32), bytes([1] * 32)):
        one, other = split(first, 3, key), split(second, 3, key)
        assert all(np.array_equal(a, b) for a, b in zip(one[:2], other[:2], strict=True))
        for share in one:
            assert abs(np.mean(share.astype(np.float64)) / 2**63 - 1) < 0.1  # five standard deviations
    assert not np.array_equal(split(first, 3, bytes(32))[0], split(first, 3, bytes([1] * 32))[0])


# Noise


@given(st.integers(0, 2**32), st.sampled_from([0, 2, 5, 300]))
@examples(40)
def test_one_record_moves_the_counts_by_at_most_the_bound(seed: int, classes: int) -> None:
    noise = Noise.of(classes, 8.0, "record", 1.0, 1e-5)
    rng = np.random.default_rng(seed)
    if classes:
        logits = 10 * rng.normal(size=(1, classes))
        result = counted(noise.form, logits, rng.integers(classes, size=1))
    else:
        result = forecast(noise.form, 20 * rng.normal(size=1), np.zeros(1))
    moved = np.linalg.norm(result.numbers.astype(float))
    assert moved <= noise.form.unit * math.sqrt(noise.form.parts)
    assert moved >= 0.4 * noise.form.unit  # and not by much less: the bound is not idle


@pytest.mark.parametrize("classes", [0, 2, 300])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_with_noise_a_record_without_a_finite_result_counts_as_the_worst(classes: int, value: float) -> None:
    form = Noise.of(classes, 8.0, "record", 1.0, 1e-5).form
    outputs, labels = np.full((1, classes or 1), value), np.zeros(1, np.int64)
    found = tally(form, outputs, labels, np.array([value]))
    assert np.linalg.norm(found.numbers.astype(float)) <= form.unit * math.sqrt(form.parts)
    assert [found.mean(name) for name in form.sums] == [form.limit(name) for name in form.sums]
    with pytest.raises(FederationError, match="not finite"):
        tally(Form(classes), outputs, labels, np.array([value]))


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 60))
@examples(40)
def test_another_site_moves_the_counts_by_at_most_the_bound(seed: int, mine: int, others: int) -> None:
    noise, bound = Noise.of(4, 8.0, "site", 1.0, 1e-5), BOUNDS["site"]
    vectors = []
    for records, one in ((mine, seed), (others, seed + 1)):
        result = counted(noise.form, *classified(one, records, 4))
        vectors.append(bound.normalise(result.numbers, records).astype(float))
    assert np.linalg.norm(vectors[0] - vectors[1]) <= bound.factor * noise.form.unit * math.sqrt(noise.form.parts)


@pytest.mark.parametrize("protects", ["record", "site"])
def test_the_noise_has_the_deviation_that_the_ledger_is_charged(protects: str) -> None:
    noise = Noise.of(4, 8.0, protects, 2.0, 1e-5)
    assert noise.multiplier == gaussian.sigma(2.0, 1e-5)
    clean = counted(noise.form, *classified(1, 500, 4))
    values = BOUNDS[protects].normalise(clean.numbers, 500)
    keys = [bytes([k] * 32) for k in range(20)]
    drawn = np.concatenate([noise.add(clean, key).numbers - values for key in keys]).astype(float)
    spread = noise.multiplier * BOUNDS[protects].factor * noise.form.unit * math.sqrt(noise.form.parts)
    # The sample's deviation is within five of its own standard errors.
    assert drawn.std() == pytest.approx(spread, rel=5 / math.sqrt(2 * drawn.size))
    assert abs(drawn.mean()) < 5 * spread / math.sqrt(drawn.size)


@pytest.mark.parametrize("protects", ["record", "site"])
def test_measures_are_as_precise_as_the_noise_allows(protects: str) -> None:
    noise, sites = Noise.of(2, 8.0, protects, 8.0, 1e-5), 400
    logits, labels = classified(2, 50 * sites, 2)
    parts = zip(np.split(logits, sites), np.split(labels, sites), strict=True)
    keys = (k.to_bytes(32, "big") for k in range(sites))
    vectors = [noise.add(counted(noise.form, *part), key).vector for part, key in zip(parts, keys, strict=True)]
    found, clean = scores(Tally.of(noise.form, added(vectors, noise.form.length))), counted(Form(2), logits, labels)
    weight = sites * (50 if protects == "record" else 1)
    off = 5 * noise.deviation / noise.form.unit * math.sqrt(sites) / weight  # five deviations of one number's mean
    # Accuracy and the number of records have noise, the two correct cells too.
    assert found.accuracy == pytest.approx(scores(clean).accuracy, abs=2 * off)
    assert found.loss == pytest.approx(scores(clean).loss, abs=2 * 8.0 * off)
    assert found.auroc is not None


def test_only_neighbours_whose_counts_are_a_known_distance_apart_have_a_budget() -> None:
    assert bounded("record", "add-or-remove")
    assert bounded("site", "replace")
    assert not bounded("record", "replace")
    assert not bounded(None, None)


def test_a_budget_too_small_for_whole_numbers_is_refused() -> None:
    with pytest.raises(FederationError, match="too small"):
        Noise.of(2, 8.0, "record", 1e-9, 1e-12)
