"""Attacks on secret orders: matching finds them wherever the server held an earlier model, beside chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.common.attack import Unsuitable
from attacks.common.replay import replay
from attacks.permutation import shadows
from attacks.permutation.factors import Factors, after, between
from attacks.permutation.invariants import Invariants, Step, invariants, linear
from attacks.permutation.matching import MATCHERS, alternating, published
from attacks.permutation.score import chance, correct
from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.steps.permute import tazza
from fl_privacy.steps.permute.shuffled import example_rules
from fl_privacy.tasks.workload import Workload

SECRET = bytes(range(32))


def config(epochs: int = 1, **changes: Any) -> Federation:
    values = {
        "name": "test",
        "sites": 4,
        "rounds": 2,
        "task": {
            "dataset": "digits",
            "model": "mlp",
            "partition": {"kind": "dirichlet", "alpha": 0.5},
            "train": {"epochs": epochs},
        },
        "permute": {"kind": "tazza"},
        "route": {"kind": "server", "mailbox": True},
        "evaluate": "sites",
        "audit": True,
        **changes,
    }
    return Federation.model_validate(values)


def factors_of(module: torch.nn.Module, example: torch.Tensor) -> Factors:
    return Factors(tazza.rules(module, example), vector.flatten(module)[1])


def closed(factors: Factors, model: vector.Vector, round: int) -> tuple[vector.Vector, dict[int, np.ndarray]]:
    """A model in a round's order, and that order as a site's truth has it."""
    rule = factors.rules.draw(SECRET, "test", round)
    where = np.arange(model.size, dtype=np.float32)
    return rule.apply(model, factors.layout), factors.order_of(rule.apply(where, factors.layout).astype(np.int64))


@pytest.mark.parametrize("epochs", [1, 5, 20])
def test_the_servers_own_first_model_gives_away_every_index_after_local_training(epochs: int) -> None:
    federation = config(epochs, permute={"kind": "tazza-published"})
    work = Workload(federation)
    factors = Factors(example_rules(federation), work.layout)
    updates = np.stack([work.update(work.initial, work.site_data(n), n, 1) for n in federation.site_names])
    one, right = closed(factors, work.initial + updates[0], 1)  # a single site, which diverges most
    for trained in (one, closed(factors, work.initial + updates.mean(axis=0), 1)[0]):
        found = alternating(factors, trained, work.initial)
        assert correct(factors, found, right, factors.hidden) >= 0.99
        assert correct(factors, found, right, factors.inputs) >= 0.99
    weak = published(factors, one, work.initial)
    assert correct(factors, weak, right, factors.inputs) < 0.2  # with hidden orders changed too, 7.6.1 fails


MODELS = {
    "deep": lambda: torch.nn.Sequential(
        torch.nn.Linear(12, 30), torch.nn.ReLU(), torch.nn.Linear(30, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3)
    ),
    "channels": lambda: torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32, 5)
    ),
}
EXAMPLES = {"deep": (2, 12), "channels": (2, 3, 4, 4)}


@pytest.mark.parametrize("name", MODELS)
def test_matching_finds_the_orders_of_deeper_models_and_of_channels(name: str) -> None:
    torch.manual_seed(1)
    module = MODELS[name]()
    factors, rng = factors_of(module, torch.randn(EXAMPLES[name])), np.random.default_rng(0)
    model = vector.flatten(module)[0]
    noisy = (model + 0.01 * rng.standard_normal(model.size)).astype(np.float32)
    moved, right = closed(factors, noisy, 1)
    found = alternating(factors, moved, model)
    assert correct(factors, found, right, factors.moving) == 1
    assert not np.array_equal(found[factors.moving[0]], np.arange(factors.size(factors.moving[0])))


def test_an_unrelated_model_gives_chance() -> None:
    federation, shares = config(), list[float]()
    work = Workload(federation)
    factors, rng = Factors(example_rules(federation), work.layout), np.random.default_rng(0)
    for round in range(1, 9):
        moved, right = closed(factors, rng.standard_normal(work.layout.size).astype(np.float32), round)
        shares += [
            correct(factors, match(factors, moved, work.initial), right, factors.inputs) for match in MATCHERS.values()
        ]
    expected = chance(factors, factors.inputs)
    assert expected == 1 / 64
    assert abs(np.mean(shares) - expected) < 5 * np.sqrt(1 / 64**2 / len(shares))  # fixed points have variance 1


def test_orders_relative_to_each_other_and_to_the_plain_model_agree() -> None:
    federation = config()
    factors = Factors(example_rules(federation), Workload(federation).layout)
    model = np.arange(factors.layout.size, dtype=np.float32)
    (first, one), (_, two) = closed(factors, model, 1), closed(factors, model, 2)
    relative = between(two, one)
    again = after(relative, one)
    assert all(np.array_equal(again[group], two[group]) for group in factors.moving)
    assert correct(factors, alternating(factors, first, model), one, factors.moving) == 1


def test_models_with_an_order_per_head_or_gate_are_refused_with_the_reason() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    with pytest.raises(Unsuitable, match="per head or gate"):
        factors_of(torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(24, 3)), torch.randn(2, 3, 8))


def test_hidden_orders_cancel_in_the_invariants_and_input_orders_move_them() -> None:
    torch.manual_seed(2)
    module, rng = MODELS["deep"](), np.random.default_rng(1)
    factors, before = factors_of(module, torch.randn(EXAMPLES["deep"])), vector.flatten(module)[0]
    trained = (before + 0.1 * rng.standard_normal(before.size)).astype(np.float32)
    (group,) = factors.inputs
    (start, order), (end, _) = closed(factors, before, 1), closed(factors, trained, 1)
    plain = invariants(factors, [Step(before, [trained], np.arange(12))])
    moved = invariants(factors, [Step(start, [end], np.arange(12))])
    opened = invariants(factors, [Step(start, [end], order[group])])
    source = order[group]
    assert not np.array_equal(source, np.arange(12))
    for found, product, moment in (
        (moved, plain.product[:, source], plain.moment[source][:, source]),
        (opened, plain.product, plain.moment),
    ):
        assert np.allclose(found.product, product, rtol=0, atol=1e-5 * np.abs(product).max())
        assert np.allclose(found.moment, moment, rtol=0, atol=1e-5 * np.abs(moment).max())


@pytest.mark.parametrize("related", [True, False])
def test_shadows_say_which_input_is_which_where_they_are_related_and_nothing_otherwise(related: bool) -> None:
    rng, shares = np.random.default_rng(3), list[float]()
    for _ in range(20):
        product, root = rng.standard_normal((4, 30)), rng.standard_normal((40, 30))

        def like(scale: float, product: Any = product, root: Any = root) -> Invariants:
            noisy = root + scale * rng.standard_normal(root.shape)
            return Invariants(product + scale * rng.standard_normal(product.shape), noisy.T @ noisy)

        seen, source = like(0.1 if related else 30), rng.permutation(30)
        moved = Invariants(seen.product[:, source], seen.moment[source][:, source])
        found = shadows.absolute(moved, [like(0.1) for _ in range(6)])
        shares.append(float(np.mean(found["moments"] == source)))
    assert np.mean(shares) > 0.95 if related else np.mean(shares) < 0.15  # chance: 0.033, and a deviation of 0.007


def test_models_that_are_no_chain_of_linear_layers_have_no_such_invariants() -> None:
    assert linear(factors_of(MODELS["deep"](), torch.randn(EXAMPLES["deep"]))) == ("0.weight", "2.weight", "4.weight")
    assert linear(factors_of(MODELS["channels"](), torch.randn(EXAMPLES["channels"]))) == ()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_recorded_run_of_the_published_variant_is_opened(tmp_path: Path) -> None:
    result = up(config(permute={"kind": "tazza-published"}), "simulation", tmp_path)
    found = replay(Path(result.path), ["permutation"], seeds=1)["permutation"]
    for name in ("alternating", "absolute", "colluding"):
        for kind in ("inputs", "hidden"):
            measure = found["measures"][f"{name}_{kind}"]
            assert measure["value"] >= 0.99
            assert measure["chance"] == 1 / 64
    assert set(found["curves"]["hidden, alternating, by round"]) == {"1", "2"}


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_where_sites_start_from_a_secret_rounds_are_connected_and_shadow_models_know_inputs(tmp_path: Path) -> None:
    result = up(config(5, rounds=4), "simulation", tmp_path)
    found = replay(Path(result.path), ["permutation"], seeds=1)["permutation"]
    assert not any(name.startswith("absolute") for name in found["measures"])
    assert found["measures"]["alternating_inputs"]["value"] >= 0.99
    assert set(found["curves"]["inputs, alternating, by round"]) == {"2", "3", "4"}  # no earlier model in round 1
    for name in ("products_inputs", "moments_inputs"):
        assert found["measures"][name]["value"] > 8 * found["measures"][name]["chance"]
