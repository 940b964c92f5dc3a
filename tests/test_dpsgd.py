"""DP-SGD: per-record gradients, the noise and its calibration, what is charged, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from client_app.site import Site
from fl_privacy import vector
from fl_privacy.combine import mean, weights
from fl_privacy.config import Federation
from fl_privacy.config.policy import PolicyError
from fl_privacy.crypto import keys
from fl_privacy.dp import dpsgd, gaussian, ldp, per_record, sampled
from fl_privacy.dp.ledger import Charge, Ledger, LedgerError, compose
from fl_privacy.dp.sampled import Plan, Private
from fl_privacy.errors import FederationError
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority
from fl_privacy.steps.base import At
from fl_privacy.tasks import models
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.train import Recipe, fit, loss_of
from fl_privacy.tasks.workload import Workload
from fl_privacy.theory.budget import tiers
from fl_privacy.transcript.read import View
from sites import Idle

DELTA = 1e-5
KEY = b"k" * 32
SHAPES = {
    "mlp": (1, 8, 8),
    "logistic": (13,),
    "lenet5": (1, 12, 12),
    "sigmoid-lenet": (1, 12, 12),
    "cnn": (3, 12, 12),
    "cnn1d": (32, 3),
    "cnn5x5": (1, 16, 16),
    "mobilecnn": (3, 12, 12),
    "resnet9": (3, 8, 8),
    "lstm": (20, 3),
    "transformer": (20, 3),
}
CONFIG = """
name: here
sites: {count: 3, epsilon: 8}
task: {train: {epochs: 2, batch_size: 64, lr: 0.3}}
privatise: {kind: dpsgd}
route: {kind: shuffler, n_min: 3}
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As at a site: a second thread only slows down models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(name: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in float64, where rounding does not flip a ReLU, and records for it."""
    classes = 0 if name == "lstm" else 10
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, *SHAPES[name], generator=generator, dtype=torch.float64)
    y = torch.randint(10, (count,), generator=generator) if classes else x.flatten(1).sum(dim=1)
    return models.build(name, SHAPES[name], classes, seed=3).double(), x, y


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> list[tuple[Tensor, ...]]:
    """Each record's gradient computed separately by autograd."""
    found = list(model.parameters())
    return [torch.autograd.grad(loss_of(model(x[i : i + 1]), y[i : i + 1]), found) for i in range(len(y))]


def test_every_shipped_model_is_covered() -> None:
    assert set(SHAPES) == set(models.BUILDERS)


@pytest.mark.parametrize("name", SHAPES)
def test_per_record_gradients_equal_those_of_single_records(name: str) -> None:
    model, x, y = batch(name, 5)
    found, alone = per_record.gradients(model, x, y), one_by_one(model, x, y)
    assert [g.shape[1:] for g in found] == [w.shape for w in model.parameters()]
    for index, rows in enumerate(found):
        torch.testing.assert_close(rows, torch.stack([record[index] for record in alone]), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ["lenet5", "mobilecnn"])
def test_per_record_gradients_match_opacus(name: str) -> None:
    from opacus import GradSampleModule

    model, x, y = batch(name, 5)
    found = per_record.gradients(model, x, y)
    loss_of(GradSampleModule(model, loss_reduction="sum")(x), y, "sum").backward()
    for rows, weight in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(rows, weight.grad_sample, rtol=1e-9, atol=1e-12)


def records(shape: tuple[int, ...], classes: int) -> Dataset:
    y = np.arange(4) % classes if classes else np.zeros(4, np.float32)
    return Dataset(np.zeros((4, *shape), np.float32), y)


@pytest.mark.parametrize("name", SHAPES)
def test_shipped_models_pass_the_self_test(name: str) -> None:
    classes = 0 if name == "lstm" else 10
    model = models.build(name, SHAPES[name], classes, seed=0)
    before, _ = vector.flatten(model)
    per_record.check(model, records(SHAPES[name], classes))
    assert np.array_equal(vector.flatten(model)[0], before)


class Centred(nn.Module):
    """Not a batch normalisation by name, but every record's output depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0) if len(x) > 1 else x


class Counting(nn.Module):
    """Keeps state from the records it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum().detach()
        return x


BAD = {
    "batch norm": nn.BatchNorm2d(4),
    "batch norm without weights": nn.BatchNorm2d(4, affine=False),
    "batch norm without statistics": nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    "instance norm with statistics": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "centred": Centred(),
    "counting": Counting(),
}


@pytest.mark.parametrize("kind", BAD)
def test_models_that_mix_or_remember_records_are_refused_with_the_fix(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), BAD[kind], nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
    with pytest.raises(FederationError, match=r"task\.model: .*GroupNorm") as error:
        per_record.check(model, records((1, 8, 8), 10))
    assert "\n" not in str(error.value)
    if kind == "batch norm":  # a layer that Opacus knows is named
        assert "BatchNorm2d '1'" in str(error.value)


def norm(parts: list[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().pow(2).sum()) for part in parts))


@pytest.mark.parametrize("bound", [1e-3, 0.5, 1e6])
def test_a_record_moves_the_sum_by_at_most_the_bound_over_the_whole_model(bound: float) -> None:
    model, x, y = batch("mlp", 6)
    model, x = model.float(), x.float()
    alone = one_by_one(model, x, y)
    for index in range(len(y)):
        clipped = dpsgd.clipped_sum(model, x[index : index + 1], y[index : index + 1], bound)
        assert norm(clipped) <= bound
        assert norm(clipped) == pytest.approx(min(bound, norm(list(alone[index]))), rel=1e-5)
    # All records together move the sum by the sum of what each moves, and splitting a large batch changes nothing.
    whole = dpsgd.clipped_sum(model, x, y, bound)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpsgd, "MOST_NUMBERS", 2 * sum(w.numel() for w in model.parameters()))
        parted = dpsgd.clipped_sum(model, x, y, bound)
    each = [dpsgd.clipped_sum(model, x[i : i + 1], y[i : i + 1], bound) for i in range(len(y))]
    for index, total in enumerate(whole):
        torch.testing.assert_close(total, torch.stack([record[index] for record in each]).sum(dim=0))
        torch.testing.assert_close(total, parted[index])


def test_a_record_whose_gradient_overflows_cannot_fail_the_round() -> None:
    model, x, y = batch("mlp", 4)
    model, x = model.float(), x.float()
    x[2] = float("inf")
    others = [0, 1, 3]
    for found, expected in zip(
        dpsgd.clipped_sum(model, x, y, 1.0), dpsgd.clipped_sum(model, x[others], y[others], 1.0), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [1e35, 1e37, 3e38])
def test_a_huge_gradient_moves_the_sum_by_at_most_the_bound_too(size: float) -> None:
    """Below 1e-38 a float32 factor loses its digits: the norm was more than the bound."""
    model = torch.nn.Linear(1000, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    x, y = torch.full((1, 1000), size), torch.ones(1)
    for bound in (1.0, 1e-2, 1e-4):
        total = dpsgd.clipped_sum(model, x, y, bound, lambda outputs, labels, _: (outputs[:, 0] * labels).sum())
        assert norm(total) <= bound


def trained(plan: Plan, data: Dataset, recipe: Recipe, key: bytes = KEY) -> np.ndarray:
    """The complete change that a training makes to a wide model."""
    model = models.build("mlp", (1, 8, 8), 10, seed=0, hidden=(4000,))
    start, _ = vector.flatten(model)
    dpsgd.fit(model, data, recipe, Private(plan, key))
    return vector.flatten(model)[0] - start


def digits(count: int) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset(rng.random((count, 1, 8, 8), np.float32), rng.integers(10, size=count))


def test_an_empty_batch_gets_the_same_noise_as_every_other() -> None:
    """At a rate of almost 0 all batches are empty: only noise is left, once per step."""
    plan = Plan(rate=1e-12, steps=3, batch=4.0, clip=0.5, noise=2.0)
    found = trained(plan, digits(8), Recipe(epochs=1, batch_size=4, lr=0.25))
    expected = 0.25 * math.sqrt(3) * 2.0 * 0.5 / 4.0
    # An estimated sigma of n Gaussians has standard deviation sigma / sqrt(2 n), a mean sigma / sqrt(n); six of each.
    assert found.std() == pytest.approx(expected, rel=6 / math.sqrt(2 * found.size))
    assert abs(found.mean()) < 6 * expected / math.sqrt(found.size)


def test_the_noise_of_a_step_is_its_multiplier_times_the_bound_over_the_expected_batch() -> None:
    """What noise adds to the same batches in a single step: the bound is the same in both, so gradients cancel."""
    recipe, data = Recipe(epochs=1, batch_size=4, lr=1.0), digits(8)
    plan = Plan(rate=0.5, steps=1, batch=4.0, clip=0.3, noise=1.5)
    silent = Plan(rate=0.5, steps=1, batch=4.0, clip=0.3, noise=0.0)
    noise = trained(plan, data, recipe) - trained(silent, data, recipe)
    assert noise.std() == pytest.approx(1.5 * 0.3 / 4.0, rel=6 / math.sqrt(2 * noise.size))
    assert not np.array_equal(trained(plan, data, recipe, b"x" * 32), trained(plan, data, recipe))


def test_without_sampling_clipping_and_noise_it_is_gradient_descent() -> None:
    recipe, data = Recipe(3, 8, lr=0.1, momentum=0.9, weight_decay=0.01, proximal=0.1), digits(8)
    private = Private(sampled.plan(8, 3, 8, 1.0, 4.0, DELTA), KEY)
    assert (private.plan.rate, private.plan.steps, private.plan.batch) == (1.0, 3, 8.0)
    plain = models.build("mlp", (1, 8, 8), 10, seed=0, hidden=(4000,))
    start, _ = vector.flatten(plain)
    fit(plain, data, recipe, seed=0)
    # Batches of all eight records in any order: float32 sums differ in their last digits.
    np.testing.assert_allclose(
        trained(private.clean.plan, data, recipe), vector.flatten(plain)[0] - start, rtol=1e-3, atol=1e-6
    )


# From Opacus's own solver (get_noise_multiplier, accountant prv, epsilon to 0.001), which takes ten seconds for these.
KNOWN = {(1.0, 1 / 9, 18): 2.2144, (8.0, 1 / 5, 20): 0.8994, (2.0, 1 / 375, 1875): 0.6813}
PRV_ERROR = 0.01


@pytest.mark.parametrize("problem", KNOWN)
def test_noise_matches_opacus_and_keeps_the_budget(problem: tuple[float, float, int]) -> None:
    from opacus.accountants import PRVAccountant

    epsilon, rate, steps = problem
    noise = sampled.noise_multiplier(epsilon, DELTA, rate, steps)
    assert noise == pytest.approx(KNOWN[problem], rel=0.01)
    spent = compose([Charge(noise, "record", "add-or-remove", rate, steps)], DELTA)
    assert 0.99 * epsilon < spent <= epsilon
    other = PRVAccountant()
    other.history = [(noise, rate, steps)]
    # Its result exceeds the true value by up to its allowed error.
    assert other.get_epsilon(DELTA, eps_error=PRV_ERROR) - PRV_ERROR == pytest.approx(epsilon, rel=0.01)


def test_without_sampling_the_noise_is_that_of_one_gaussian() -> None:
    exact = gaussian.sigma(2.0, DELTA) * math.sqrt(5)
    assert exact <= sampled.noise_multiplier(2.0, DELTA, 1.0, 5) < exact * 1.002


def test_sites_of_similar_size_share_one_solution() -> None:
    sampled.noise_multiplier.cache_clear()
    plans = [sampled.plan(records, 2, 32, 1.0, 1.0, DELTA) for records in range(257, 289)]
    assert {(plan.rate, plan.steps) for plan in plans} == {(1 / 9, 18)}
    assert sampled.noise_multiplier.cache_info().misses == 1
    assert plans[-1].batch == 32
    with pytest.raises(FederationError, match="no records"):
        sampled.plan(0, 2, 32, 1.0, 1.0, DELTA)
    with pytest.raises(FederationError, match="no records"):
        trained(plans[0], digits(0), Recipe(1, 4, 0.1))


def federation(tmp_path: Path, epsilon: float = 20.0, more: str = "") -> Federation:
    """Site `a` has its own policy."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"epsilon_per_round: 8\nepsilon: {epsilon}\ntasks: [digits]\nunits: [record]\n")
    sites = f"sites: [{{name: a, epsilon: 8, policy: {policy}}}, {{name: b, epsilon: 8}}, {{name: c, epsilon: 9}}]"
    return Federation.parse(CONFIG.replace("sites: {count: 3, epsilon: 8}", sites) + more)


def noisy(fit: Any) -> np.ndarray:
    return np.frombuffer(fit.keywords["private"].key, np.uint8).astype(np.float32)


def never(fit: Any) -> np.ndarray:
    raise AssertionError("trained again")


def test_a_round_is_charged_per_record_and_resent_as_the_same_bytes(tmp_path: Path) -> None:
    first = Idle(federation(tmp_path), "a", tmp_path, records=288)
    sent = first.prepare("run", 1, "attempt", noisy)
    again = Idle(federation(tmp_path), "a", tmp_path, records=288)
    for site in (first, again):
        assert np.array_equal(site.prepare("run", 1, "attempt", never), sent)
        report = site.ledger.report()
        assert (report["charges"], report["unit"], report["adjacency"]) == (1, "record", "add-or-remove")
        assert 7.9 < report["spent"] <= 8
    assert not np.array_equal(first.prepare("run", 1, "another", noisy), sent)


def test_the_round_that_would_overspend_is_refused_before_training(tmp_path: Path) -> None:
    site = Idle(federation(tmp_path, epsilon=10.0), "a", tmp_path, records=288)
    site.prepare("run", 1, "attempt", noisy)
    with pytest.raises(LedgerError, match="nothing was spent or sent"):
        site.prepare("run", 2, "attempt", never)


def test_a_ledger_of_whole_updates_refuses_record_level_charges(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.jsonl", 20.0, DELTA, "a").charge("before", ldp.charge(1.0, DELTA))
    with pytest.raises(LedgerError, match="give the federation another name"):
        Idle(federation(tmp_path), "a", tmp_path, records=288).prepare("run", 1, "attempt", never)


def test_a_policy_binds_and_a_site_without_records_is_named(tmp_path: Path) -> None:
    text = CONFIG.replace("epsilon: 8", f"epsilon: 9, policy: {tmp_path / 'policy.yaml'}")
    federation(tmp_path)
    with pytest.raises(PolicyError, match="epsilon 9"):
        Idle(Federation.parse(text), "site-0", tmp_path, records=288)
    with pytest.raises(FederationError, match="no records"):
        Idle(federation(tmp_path), "a", tmp_path, records=0)
    made = federation(tmp_path)
    policy = tmp_path / "policy.yaml"
    policy.write_text(policy.read_text().replace("units: [record]\n", ""))
    with pytest.raises(PolicyError, match="protects a record; allowed: site"):
        Idle(made, "a", tmp_path, records=288)


def test_keys_are_seeded_only_in_a_reproducible_run(tmp_path: Path) -> None:
    def key(name: str, more: str = "") -> np.ndarray:
        return Idle(federation(tmp_path, more=more), "b", tmp_path / name, 288).prepare("run", 1, "attempt", noisy)

    assert not np.array_equal(key("one"), key("two"))
    assert np.array_equal(key("three", "reproducible: true"), key("four", "reproducible: true"))


@pytest.mark.parametrize(
    ("more", "field", "fix"),
    [
        ("route: {kind: shuffler, buckets: levelled}", "route.buckets", "published"),
        ("combine: {kind: fedavg, weights: precision}", "combine.weights", "epsilon"),
    ],
)
def test_choices_that_need_noise_on_the_update_are_refused(more: str, field: str, fix: str) -> None:
    text = "sites: {count: 3, epsilon: 1}\nprivatise: {kind: dpsgd}\n"
    with pytest.raises(FederationError, match=f"{field}: .*use {fix}"):
        Federation.parse(text + more)
    assert Federation.parse(text + more.replace("levelled", "published").replace("precision", "epsilon"))


def test_a_plan_shows_the_noise_per_step_and_the_epsilon_of_all_rounds() -> None:
    (tier,) = tiers(Federation.parse(CONFIG + "rounds: 2"))
    plan = sampled.plan(1438 // 3, 2, 64, 1.0, 8.0, DELTA)
    assert (tier.epsilon, tier.sites, tier.unit) == (8, 3, "record")
    assert tier.scale == pytest.approx(plan.noise / plan.batch)
    assert 8 < tier.composed == compose([plan.charge] * 2, DELTA) < 16


def sites_of(made: Federation, folder: Path) -> list[Site]:
    """Sites as in a simulation: in one process, with one workload."""
    work, authority = Workload(made), Authority.open(folder / "ca")
    found = []
    for name in made.site_names:
        authority.issue(Identity(made.name, "site", name), folder / name / "keys", ("localhost",))
        ring = Keyring(folder / name / "keys")
        found.append(Site(made, name, ring, [], truth=folder / name / "truth", state=folder / name, workload=work))
    return found


def test_a_federation_learns_and_its_truth_is_the_training_without_noise(tmp_path: Path) -> None:
    made = Federation.parse(CONFIG + "audit: true\nreproducible: true\ncombine: {kind: fedavg, weights: epsilon}")
    sites, work = sites_of(made, tmp_path), Workload(made)
    model = work.initial
    shares = weights.RULES["epsilon"]([8.0] * 3, DELTA)
    for round in (1, 2, 3):
        updates = np.stack([site.parcel(At("run", round, f"attempt-{round}"), model).payload for site in sites])
        model = model + mean.weighted(updates, shares, exact=True)
    data = work.site_data("site-0")
    private = Private(
        sampled.plan(len(data), 2, 64, 1.0, 8.0, DELTA), keys.derive(bytes(32), "here", 1, "site-0", "noise")
    )
    clean = work.update(work.initial, data, "site-0", 1, private=partial(dpsgd.fit, private=private.clean))
    truth = View(tmp_path / "site-0" / "truth")
    assert truth.rounds == [1, 2, 3]
    assert np.array_equal(truth.round(1).arrays["update"], clean)
    sent = sites[0].parcel(At("run", 3, "attempt-3"), model).payload  # a resend of the last round
    assert np.array_equal(sent, updates[0])
    assert not np.array_equal(sent, truth.round(3).arrays["update"])
    accuracy = work.evaluate(model).accuracy
    # Chance is 0.1; without noise this recipe reaches 0.9.
    assert accuracy is not None
    assert accuracy > 0.6
