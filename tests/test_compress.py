"""The baselines of `compress`: what they keep, how far they are off on average, and that they run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from client_app.site import Site
from fl_privacy.coding import FLOAT32, Payload
from fl_privacy.config import Federation
from fl_privacy.crypto import keys
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import ConfigError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.steps import STEPS
from fl_privacy.steps.base import At, Running, Seat
from fl_privacy.steps.compress.baseline import count_of
from fl_privacy.steps.compress.priprune import withheld
from fl_privacy.steps.compress.prune import pruned
from fl_privacy.steps.compress.qsgd import quantised
from fl_privacy.steps.compress.randomk import random_k
from fl_privacy.steps.compress.soteriafl import sparsified
from fl_privacy.steps.compress.topk import top_k
from fl_privacy.steps.compress.uniform import rounded
from fl_privacy.theory import utility
from fl_privacy.theory.forecast import forecast
from fl_privacy.transcript import open_run
from fl_privacy.vector import Entry, Layout

PARAMETERS = 60
LAYOUT = Layout((Entry("w", (10, 4)), Entry("b", (20,))))


def vectors(size: Any) -> st.SearchStrategy[np.ndarray]:
    """Updates without zeros: what is kept of them can be counted."""
    drawn = hnp.arrays(np.float32, size, elements=st.floats(-1e3, 1e3, width=32))
    return drawn.map(lambda update: update + np.copysign(np.float32(2.0**-10), update))


updates = vectors(st.integers(1, 200))
shares = st.floats(0.01, 1)
single_use = st.binary(min_size=32, max_size=32)


def key(number: int) -> bytes:
    return keys.derive(b"tests of compression", "run", number, "a", "compress")


# Sparsification


@given(update=updates, share=shares)
def test_top_k_keeps_exactly_the_largest(update: np.ndarray, share: float) -> None:
    count = count_of(share, update.size)
    kept = top_k(update, count)
    assert np.count_nonzero(kept) == count
    assert np.array_equal(kept[kept != 0], update[kept != 0])
    if count < update.size:
        assert np.abs(update[kept == 0]).max() <= np.abs(kept[kept != 0]).min()


@given(update=updates, share=shares, cut=st.floats(0, 1))
def test_pruning_keeps_its_share_of_every_tensor_and_does_nothing_twice(
    update: np.ndarray, share: float, cut: float
) -> None:
    edge = round(cut * update.size)
    tensors = [slice(0, edge), slice(edge, update.size)]
    once = pruned(update, share, tensors)
    for tensor in tensors:
        size = update[tensor].size
        assert np.count_nonzero(once[tensor]) == (count_of(share, size) if size else 0)
    assert np.array_equal(pruned(once, share, tensors), once)
    assert np.array_equal(top_k(top_k(update, edge), edge), top_k(update, edge))


@given(update=updates, share=st.floats(0.01, 0.99))
def test_priprune_withholds_exactly_what_top_k_keeps(update: np.ndarray, share: float) -> None:
    count = round(share * update.size)
    sent = withheld(update, count)
    assert np.count_nonzero(sent) == update.size - count
    assert np.array_equal(sent + top_k(update, count), update)


@given(update=updates, share=shares, secret=single_use)
def test_random_k_keeps_exactly_its_share_scaled_up(update: np.ndarray, share: float, secret: bytes) -> None:
    count = count_of(share, update.size)
    kept = random_k(update, count, secret)
    assert np.count_nonzero(kept) == count
    factor = np.float32(update.size / count)
    assert np.array_equal(kept[kept != 0], update[kept != 0] * factor)
    assert np.array_equal(random_k(update, update.size, secret), update)


# Unbiased ones


def variance(kind: str, update: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
    """A draw of a compression by key, and of each of its entries the variance and the largest error."""
    exact, size = np.abs(update.astype(np.float64)), update.size
    if kind == "random-k":
        omega = size / (size // 4) - 1
        return lambda one: random_k(update, size // 4, one), omega * exact**2, omega * exact
    if kind == "sparsified":
        omega = utility.omega(0.25)
        return lambda one: sparsified(update, 0.25, one), omega * exact**2, omega * exact
    levels = 3
    step = np.linalg.norm(exact) / levels
    part = exact / step - np.floor(exact / step)
    return lambda one: quantised(update, levels, one), step**2 * part * (1 - part), np.full(size, step)


@settings(max_examples=5)
@given(update=vectors(40), first=st.integers(0, 2**20))
@pytest.mark.parametrize("kind", ["random-k", "sparsified", "qsgd"])
def test_compression_is_unbiased_with_the_variance_of_its_closed_form(
    kind: str, update: np.ndarray, first: int
) -> None:
    draw, expected, step = variance(kind, update)
    count = 2000
    drawn = np.stack([draw(key(first + i)) for i in range(count)]).astype(np.float64)
    # Bernstein: a mean is further off with a probability of at most 2 exp(-18). And the rounding of float32.
    rounding = 2.0**-22 * np.linalg.norm(update.astype(np.float64))
    assert np.all(np.abs(drawn.mean(axis=0) - update) <= 6 * np.sqrt(expected / count) + 6 * step / count + rounding)
    errors = ((drawn - update) ** 2).sum(axis=1)
    spread = 6 * errors.std() / math.sqrt(count) + 6 * (step**2).sum() / count
    assert abs(errors.mean() - expected.sum()) <= spread + rounding * step.sum()


# Quantisation


@given(update=updates, levels=st.integers(1, 1000), secret=single_use)
def test_qsgd_sends_whole_levels_next_to_the_entries(update: np.ndarray, levels: int, secret: bytes) -> None:
    norm = np.linalg.norm(update.astype(np.float64))
    level = quantised(update, levels, secret).astype(np.float64) * levels / norm
    assert np.allclose(level, np.rint(level), atol=1e-4, rtol=1e-6)
    assert np.abs(level).max() <= levels * (1 + 1e-6)
    assert np.all(np.abs(level - update * (levels / norm)) <= 1 + 1e-4)
    assert np.all(level * update >= 0)


@given(update=updates, bits=st.integers(1, 8))
def test_uniform_quantisation_has_so_many_even_levels_and_keeps_the_ends(update: np.ndarray, bits: int) -> None:
    found = rounded(update, bits)
    assert len(np.unique(found)) <= 2**bits
    low, high = float(update.min()), float(update.max())
    assert found.min() == low
    ulp = np.spacing(np.abs(update).max())
    assert abs(found.max() - high) <= ulp
    half = (high - low) / (2**bits - 1) / 2
    assert np.all(np.abs(found.astype(np.float64) - update) <= half + ulp)


def test_an_update_of_zeros_stays_one() -> None:
    zeros = np.zeros(7, np.float32)
    for found in (quantised(zeros, 4, key(1)), rounded(zeros, 2), random_k(zeros, 3, key(1)), top_k(zeros, 3)):
        assert np.array_equal(found, zeros)


# As steps

KINDS = ("prune", "top-k", "random-k", "qsgd", "uniform", "priprune", "soteriafl")
STOCHASTIC = ("random-k", "qsgd", "soteriafl")
LDP = "sites: {count: 3, epsilon: 8}\nprivatise: {kind: ldp}\n"
SEEDED = "reproducible: true"
UPDATE = np.random.default_rng(0).normal(size=PARAMETERS).astype(np.float32)


def started(kind: str, config: str = "") -> Running:
    federation = Federation.parse(f"{LDP}compress: {{kind: {kind}}}\n{config}")
    work: Any = SimpleNamespace(layout=LAYOUT)
    return federation.compress.start(Seat(federation, "site-0", work, 10, None))


def sent(kind: str, config: str = "", round: int = 1) -> Payload:
    return started(kind, config).outward(UPDATE, At("run", round, "a"))


def test_every_baseline_is_registered_and_tested_here() -> None:
    assert {f"compress.{kind}" for kind in KINDS} <= set(STEPS.ours("compress."))


@pytest.mark.parametrize("kind", KINDS)
def test_a_baseline_sends_float32_and_repeats_itself_only_if_reproducible(kind: str) -> None:
    for found in (sent(kind), sent(kind, SEEDED)):
        assert (found.dtype, found.shape) == (np.float32, (PARAMETERS,))
    assert np.array_equal(sent(kind, SEEDED), sent(kind, SEEDED))
    assert np.array_equal(sent(kind), sent(kind)) == (kind not in STOCHASTIC)
    assert np.array_equal(sent(kind, SEEDED), sent(kind, SEEDED, round=2)) == (kind not in STOCHASTIC)


@pytest.mark.parametrize("kind", KINDS)
def test_a_baseline_travels_uncompressed_and_would_be_smaller_packed(kind: str) -> None:
    federation = Federation.parse(f"{LDP}compress: {{kind: {kind}}}")
    assert federation.coding == FLOAT32
    packed = federation.compress.packed(100_000)
    assert packed is not None
    assert 0 < packed < FLOAT32.nbytes(100_000)


def test_a_shifted_compression_forgets_its_error_and_survives_a_crash() -> None:
    """The same update every round: the reference reaches it, and then nothing is lost."""
    running = started("soteriafl, keep: 0.5", SEEDED)
    state: dict[str, Any] = {}
    for round in range(1, 100):
        found = running.outward(UPDATE, At("run", round, "a"))
        restarted = started("soteriafl, keep: 0.5", SEEDED)
        restarted.restore(state)
        assert np.array_equal(restarted.outward(UPDATE, At("run", round, "a")), found)
        state = dict(running.state())
        if round == 1:  # an entry is doubled or left out
            assert np.linalg.norm(found - UPDATE) == pytest.approx(np.linalg.norm(UPDATE))
    assert np.linalg.norm(found - UPDATE) < 1e-3 * np.linalg.norm(UPDATE)


def test_a_plan_counts_only_the_coordinates_that_chance_keeps() -> None:
    whole, random, largest = (
        Federation.parse(f"sites: 5\nroute: {{kind: shards}}\ncompress: {compress}")
        for compress in ("{kind: none}", "{kind: random-k, keep: 0.1}", "{kind: top-k, keep: 0.1}")
    )
    plain, drawn, chosen = (forecast(f, 9000, f.route.cost(f, 9000), 20e6) for f in (whole, random, largest))
    assert drawn.views[0].coordinates == pytest.approx(0.1 * plain.views[0].coordinates)
    # Which entries are the largest depends on the data, so their places tell something too.
    assert chosen.views == plain.views
    assert drawn.packed == {"random-k": 4 * 900 + 32}
    assert "random-k is simulated, and updates travel as float32; packed, one would take 3,632 bytes" in str(
        list(drawn.lines())
    )
    assert (plain.packed, plain.times) == ({}, drawn.times)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{kind: top-k, keep: 0}", r"compress\.keep"),
        ("{kind: prune, keep: 1.1}", r"compress\.keep"),
        ("{kind: random-k, keep: -1}", r"compress\.keep"),
        ("{kind: qsgd, levels: 0}", r"compress\.levels"),
        ("{kind: uniform, bits: 0}", r"compress\.bits"),
        ("{kind: priprune, rate: 1}", r"compress\.rate"),
        ("{kind: soteriafl, keep: 0.0}", r"compress\.keep"),
        ("{kind: soteriafl}", "soteriafl compresses noisy updates, and privatise.kind is none; use ldp or dpsgd"),
        ("{kind: topk}", "top-k"),
    ],
)
def test_impossible_settings_are_refused_when_the_config_is_read(config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Federation.parse(f"sites: 3\ncompress: {config}")


# In a federation


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_compresses_what_it_trained(kind: str, tmp_path: Path) -> None:
    from fl_privacy.tasks.workload import Workload

    config = f"{LDP}compress: {{kind: {kind}}}\ntask: {{train: {{epochs: 1}}}}"
    federation = Federation.parse(config)
    work = Workload(federation)
    site = Site(federation, "site-0", Keyring(tmp_path), [], state=tmp_path, workload=work)
    payload = site.parcel(At("run", 1, "a"), work.initial).payload
    assert (payload.dtype, payload.shape) == (np.float32, work.initial.shape)
    assert payload.any()
    assert np.isfinite(payload).all()


@pytest.mark.e2e
def test_references_of_shifted_compression_last_from_round_to_round(tmp_path: Path) -> None:
    keep = 0.25
    text = (
        "name: shifted\nrounds: 2\nsites: {count: 3, epsilon: 8}\nprivatise: {kind: dpsgd}\nroute: {kind: server}\n"
        f"task: {{train: {{epochs: 1}}}}\ncompress: {{kind: soteriafl, keep: {keep}}}"
    )
    result = up(Federation.parse(text), "simulation", tmp_path)
    assert result.status == "completed", result.reason
    view = open_run(result.path).view("server")
    first, second = (view.round(round).arrays["updates"] for round in (1, 2))
    # Round 1 has the entries that were drawn; round 2 also the references that they left. Six standard deviations.
    for rows, share in ((first, keep), (second, 1 - (1 - keep) ** 2)):
        spread = 6 * math.sqrt(share * (1 - share) / rows[0].size)
        assert np.allclose((rows != 0).mean(axis=1), share, atol=spread, rtol=0)
    assert np.all((second != 0) | (first == 0))
