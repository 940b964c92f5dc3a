"""From a trained update to the update that leaves the site, and into its bucket."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from fl_privacy import kernels
from fl_privacy.combine import mean, weights
from fl_privacy.config import Federation, ShufflerRoute
from fl_privacy.config.policy import Policy, PolicyError
from fl_privacy.dp import gaussian, ldp
from fl_privacy.dp.ledger import LedgerError
from fl_privacy.errors import ConfigError, FederationError, ProtocolError
from fl_privacy.round.rows import Rows
from fl_privacy.shuffle import parameter
from fl_privacy.shuffle.job import Job, MixingSet, TopUp, mix
from shuffler_app import mixer
from shuffler_app.mixer import mix_apart
from sites import Idle

DELTA = 1e-5
KEY = b"k" * 32
CONFIG = """
name: here
sites: [{name: a, epsilon: 1, policy: POLICY}, {name: b, epsilon: 1}, {name: c, epsilon: 8}]
privatise: {kind: ldp, clip: 1.0}
route: {kind: shuffler, buckets: published, n_min: 3}
"""

vectors = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-1e3, 1e3, width=32))


@given(update=vectors, bound=st.floats(0.01, 100))
def test_a_clipped_update_is_never_longer_than_the_bound_and_points_the_same_way(
    update: np.ndarray, bound: float
) -> None:
    clipped = ldp.clip(update, bound).astype(np.float64)
    assert np.linalg.norm(clipped) <= bound
    if np.linalg.norm(update.astype(np.float64)) <= bound:
        assert np.array_equal(clipped, update)
    elif np.linalg.norm(clipped) > 1e-30:
        cosine = clipped @ update / np.linalg.norm(clipped) / np.linalg.norm(update.astype(np.float64))
        assert cosine == pytest.approx(1, abs=1e-5)


@given(magnitude=st.floats(30, 38.5), bound=st.floats(-6, 2), size=st.integers(1, 10_000))
def test_an_update_of_training_that_diverged_is_no_longer_than_the_bound_either(
    magnitude: float, bound: float, size: int
) -> None:
    """Below 1e-38 a float32 factor loses its digits: the norm was up to twice the bound."""
    update = np.full(size, 10.0**magnitude, np.float32)
    assert np.linalg.norm(ldp.clip(update, 10.0**bound).astype(np.float64)) <= 10.0**bound


@pytest.mark.parametrize("epsilon", [0.5, 8])
def test_the_noise_is_twice_the_bound_times_sigma(epsilon: float) -> None:
    size = 200_000
    noisy = ldp.privatise(np.zeros(size, np.float32), 0.7, epsilon, DELTA, KEY)
    expected = 2 * 0.7 * gaussian.sigma(epsilon, DELTA)
    # An estimate of sigma from n Gaussians has standard deviation sigma / sqrt(2 n); six of them.
    assert noisy.std() == pytest.approx(expected, rel=6 / np.sqrt(2 * size))


def test_topping_up_raises_a_row_to_the_noise_of_the_smallest_budget() -> None:
    size = 200_000
    rows = np.stack([ldp.privatise(np.zeros(size, np.float32), 1.0, epsilon, DELTA, KEY) for epsilon in (0.5, 8)])
    weakest = rows[0].copy()
    lack = [ldp.missing(1.0, epsilon, 0.5, DELTA) for epsilon in (0.5, 8)]
    assert lack[0] == 0
    top_ups = tuple(TopUp(deviation, bytes([row]) * 32) for row, deviation in enumerate(lack))
    mix(rows, Job("model", 2, size, (size,), (MixingSet((0, 1), b"m" * 32, top_ups),)))
    assert sum(np.array_equal(row, weakest) for row in rows) == 1
    for row in rows:
        assert row.std() == pytest.approx(ldp.scale(1.0, 0.5, DELTA), rel=6 / np.sqrt(2 * size))


def test_mixing_in_a_separate_process_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rounds are mixed in a separate process by the compiled kernel; compare with the numpy twin in this one."""
    monkeypatch.setattr(mixer, "LARGE", 2**20)
    length, tops = 2**18, (TopUp(0.5, b"t" * 32), TopUp(0.0, b"u" * 32))
    first, second = MixingSet((3, 1), b"a" * 32, tops), MixingSet((0, 2), b"b" * 32)
    job = Job("parameter", 4, length, (length,), (first, second))
    store = Rows(4, length)
    names = ["a", "b", "c", "d"]
    for index, name in enumerate(names):
        store.take(name)[:] = np.arange(index * length, (index + 1) * length)
        store.label(name, "")
    apart, _ = store.gather(names)
    here = apart.copy()
    assert kernels.choose(apart.size) == "numba"
    mix_apart(apart, store, job)
    assert not np.array_equal(apart, np.sort(apart, axis=0))
    mix(here, job, "numpy")
    assert np.array_equal(apart, here)


def test_a_failing_mixer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixer, "LARGE", 2**20)
    store = Rows(4, 2**18)
    job = Job("parameter", 4, 2**18, (2**18,), (MixingSet((0, 9), b"a" * 32),))
    with pytest.raises(ProtocolError, match="exit code 1"):
        mix_apart(np.empty((4, 2**18), np.float32), store, job)


def test_a_round_larger_than_any_memory_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no memory"):
        Rows(10_000, 2**31)


tiers = st.lists(st.sampled_from(("0.5", "1", "2", "4", "8")), min_size=3, max_size=30)


@given(
    labels=tiers, kind=st.sampled_from(("none", "published", "levelled")), level=st.sampled_from(("model", "parameter"))
)
def test_mixing_sets_contain_everyone_once_with_one_label_each(labels: list[str], kind: str, level: str) -> None:
    sets = ShufflerRoute(level=level, buckets=kind, n_min=3).groups(labels)
    assert sorted(i for group in sets for i in group.members) == list(range(len(labels)))
    assert all(len(group.members) == len(group.tiers) for group in sets)
    if kind != "none":
        assert all(len(group.members) >= 3 and len(set(group.tiers)) == 1 for group in sets)


@given(labels=tiers, seed=st.integers(0, 2**32 - 1))
def test_the_weighted_sum_of_a_bucket_is_unchanged_by_the_shuffle_bit_for_bit(labels: list[str], seed: int) -> None:
    """One weight per bucket: the server computes the same result as without the shuffler."""
    updates = np.random.default_rng(seed).standard_normal((len(labels), 40), dtype=np.float32)
    sets = ShufflerRoute(buckets="published", n_min=3).groups(labels)
    order = [i for group in sets for i in group.members]
    shares = weights.RULES["precision"]([float(t) for group in sets for t in group.tiers], DELTA)
    before = mean.weighted(updates[order], shares, exact=True)
    mixed, done = updates[order], 0
    for group in sets:
        part = mixed[done : done + len(group.members)]
        parameter.shuffle(part, KEY)
        done += len(group.members)
    assert np.array_equal(mean.weighted(mixed, shares, exact=True), before)


def policy_file(tmp_path: Path, **changes: object) -> Path:
    fields = {"epsilon_per_round": 2, "epsilon": 2.0, "tasks": "[digits]", **changes}
    path = tmp_path / "policy.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in fields.items()))
    return path


def federation(tmp_path: Path, **changes: object) -> Federation:
    return Federation.parse(CONFIG.replace("POLICY", str(policy_file(tmp_path, **changes))))


def ones(private: object = None) -> np.ndarray:
    return np.ones(50, np.float32)


def never(private: object = None) -> np.ndarray:
    raise AssertionError("trained again")


def test_an_attempt_is_trained_noised_and_charged_once(tmp_path: Path) -> None:
    site = Idle(federation(tmp_path), "a", tmp_path)
    first = site.prepare("run", 1, "attempt", ones)
    assert np.array_equal(site.prepare("run", 1, "attempt", never), first)
    assert site.ledger.report()["charges"] == 1
    assert not np.array_equal(site.prepare("run", 1, "another", ones), first)
    assert site.ledger.report()["charges"] == 2


def test_after_a_crash_the_same_bytes_go_out_without_a_new_charge(tmp_path: Path) -> None:
    first = Idle(federation(tmp_path), "a", tmp_path).prepare("run", 1, "attempt", ones)
    again = Idle(federation(tmp_path), "a", tmp_path)
    assert np.array_equal(again.prepare("run", 1, "attempt", never), first)
    assert again.ledger.report()["charges"] == 1


def test_a_charged_attempt_whose_bytes_are_lost_is_not_repeated(tmp_path: Path) -> None:
    Idle(federation(tmp_path), "a", tmp_path).prepare("run", 1, "attempt", ones)
    (tmp_path / "outgoing.npy").unlink()
    with pytest.raises(LedgerError, match="update is lost"):
        Idle(federation(tmp_path), "a", tmp_path).prepare("run", 1, "attempt", ones)


def test_a_second_process_knows_what_the_first_charged(tmp_path: Path) -> None:
    """It was opened earlier, and the first process has sent another attempt since: the bytes of this one are gone."""
    one, two = (Idle(federation(tmp_path), "a", tmp_path) for _ in range(2))
    one.prepare("run", 1, "first", ones)
    one.prepare("run", 2, "second", ones)
    with pytest.raises(LedgerError, match="update is lost"):
        two.prepare("run", 1, "first", ones)


def test_the_round_that_would_overspend_is_refused_before_any_work(tmp_path: Path) -> None:
    site = Idle(federation(tmp_path), "a", tmp_path)
    for round in (1, 2, 3):
        site.prepare("run", round, "attempt", ones)
    with pytest.raises(LedgerError, match="nothing was spent or sent"):
        site.prepare("run", 4, "attempt", never)


FORBIDDEN = {
    "epsilon_per_round": 0.5,
    "tasks": "[mnist]",
    "routes": "[shards]",
}


@pytest.mark.parametrize("field", FORBIDDEN)
def test_a_policy_binds_the_site(field: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="policy: "):
        Idle(federation(tmp_path, **{field: FORBIDDEN[field]}), "a", tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_policy_that_requires_noise_refuses_a_federation_without_it(tmp_path: Path) -> None:
    policy = Policy.load(policy_file(tmp_path))
    with pytest.raises(PolicyError, match="privatised"):
        policy.check(Federation.parse("sites: 3"), "site-0")
    with pytest.raises(PolicyError, match="not private"):
        policy.check(Federation.parse(CONFIG.replace("name: here", "reproducible: true")), "b")


def test_a_policy_refuses_an_audit_unless_it_allows_one(tmp_path: Path) -> None:
    """Under `audit: true` a site records its updates without noise."""
    audited = Federation.parse(CONFIG.replace("name: here", "audit: true"))
    policy = Policy.load(policy_file(tmp_path))
    with pytest.raises(PolicyError, match="audit"):
        policy.check(audited, "b")
    policy.model_copy(update={"audit": True}).check(audited, "b")


def test_two_processes_of_a_site_send_the_same_bytes_for_one_charge(tmp_path: Path) -> None:
    """The second begins the same attempt while the first is still training."""
    one, two = (Idle(federation(tmp_path), "a", tmp_path) for _ in range(2))
    training, go_on = threading.Event(), threading.Event()

    def slow(private: object) -> np.ndarray:
        training.set()
        assert go_on.wait(10)
        return ones()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.prepare, "run", 1, "attempt", slow)
        assert training.wait(10)
        second = pool.submit(two.prepare, "run", 1, "attempt", never)
        time.sleep(0.1)
        assert not second.done()
        go_on.set()
        assert np.array_equal(first.result(10), second.result(10))
    again = Idle(federation(tmp_path), "a", tmp_path)
    assert again.ledger.report()["charges"] == 1


@pytest.mark.parametrize(
    "text", ["", "epsilon: 1", "epsilon: -1\nepsilon_per_round: 1\ntasks: []", "a: [", "espilon: 1"]
)
def test_a_policy_that_cannot_be_read_fails_closed(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.yaml"):
        Policy.load(path)
    with pytest.raises(ConfigError, match=r"nowhere"):
        Policy.load(tmp_path / "nowhere")


PRIVATE = "sites: {count: 3, epsilon: 1}\nprivatise: {kind: ldp}\n"
BAD = {
    "sites: 3\nprivatise: {kind: ldp}": "epsilon",
    "sites: 3\nroute: {kind: shuffler, buckets: published}": "route.buckets",
    "sites: 3\ncombine: {kind: fedavg, weights: epsilon}": "combine.weights",
    "sites: {count: 3, epsilon: 0}\nprivatise: {kind: ldp}": "epsilon",
    PRIVATE + "route: {kind: shards}\ncombine: {kind: fedavg, weights: records}": "combine.weights",
    "sites: 3\ncombine: {kind: fedavg, weights: records}": "combine.weights",
}


@pytest.mark.parametrize("text", BAD)
def test_invalid_budgets_are_refused(text: str) -> None:
    with pytest.raises(FederationError, match=BAD[text]):
        Federation.parse(text)


def test_budgets_are_assigned_in_turn() -> None:
    made = Federation.parse("sites: {count: 5, epsilon: [0.5, 8]}\nprivatise: {kind: ldp}")
    assert [site.epsilon for site in made.sites] == [0.5, 8, 0.5, 8, 0.5]
    assert (made.cohort, made.quorum) == (5, 5)
