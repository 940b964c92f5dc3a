"""Gradient inversion: its parts on gradients made here, and the whole attack on a recorded run."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from attacks.common.attack import Unsuitable
from attacks.common.fetched import Models
from attacks.common.truth import Truth
from attacks.inversion import analytic, latent, pixels, quality, run, score
from attacks.inversion.gradients import Mask, Target, batch_of, filled, sight_of, targets
from attacks.inversion.grid import grid
from attacks.inversion.lpips import FILE, Lpips
from attacks.inversion.matching import Leak, certain, descend, labels
from attacks.inversion.priors import learn
from commands import cli, json_of
from fl_privacy.coding import Known
from fl_privacy.config import Federation
from fl_privacy.deploy.engines.engine import up
from fl_privacy.errors import DataError
from fl_privacy.shard import masks
from fl_privacy.tasks.workload import Workload
from fl_privacy.transcript import open_run
from profiles import examples

CLASSES, SEED = 10, 3


def config(model: str = "sigmoid-lenet", dataset: str = "digits", records: int = 1, more: str = "") -> Federation:
    return Federation.parse(
        f"name: inverted\nseed: {SEED}\nsites: 3\nrounds: 2\nrounds_per_message: 2\naudit: true\n"
        f"task: {{dataset: {dataset}, model: {model}, partition: {{records: {records}}}, "
        f"train: {{epochs: 1, batch_size: {records}, lr: 1.0}}}}\n"
        f"route: {{kind: shards, aggregators: 2}}\n{more}"
    )


@cache
def work(model: str = "sigmoid-lenet", dataset: str = "digits", records: int = 1) -> Workload:
    return Workload(config(model, dataset, records), data_folder() if dataset == "mnist" else None)


def data_folder() -> Path:
    given = os.environ.get("FL_PRIVACY_DATA")
    if not given or not (Path(given) / "mnist").is_dir():
        pytest.skip("needs mnist in FL_PRIVACY_DATA")
    return Path(given)


def half(size: int) -> Mask:
    return masks.owners(size, 2, SEED) == 0


def leak_of(used: Workload, site: int = 0, seen: Mask | None = None, zeros: bool = False) -> Leak:
    """A site's update as parties that see these coordinates have it."""
    name = used.federation.site_names[site]
    update = used.update(used.initial, used.site_data(name), name, 1)
    seen = np.ones(update.size, np.bool_) if seen is None else seen
    sight = sight_of(1, 0, used.initial, Known(update[seen]), seen, used.federation)
    target = Target(name, (sight,))
    return Leak(used.model, filled(target) if zeros else target)


def record(used: Workload, site: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    data = used.site_data(used.federation.site_names[site])
    return torch.from_numpy(data.x).double(), certain(data.y, CLASSES)


# Gradients


@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.parametrize("model", ["sigmoid-lenet", "lenet5", "mlp", "cnn"])
def test_the_update_of_one_step_is_its_gradient(model: str, records: int) -> None:
    """Up to the rounding of the weights to float32, which the division by the learning rate of 1 leaves as it is."""
    used = work(model, records=records)
    leak = leak_of(used)
    x, y = record(used)
    rounding = 4 * np.finfo(np.float32).eps * np.maximum(np.abs(used.initial), np.abs(leak.wanted.numpy())).max()
    torch.testing.assert_close(leak.gradients(x, y).detach(), leak.wanted, rtol=0, atol=max(rounding, 1e-6))


def test_only_the_attacker_that_leaves_out_what_it_did_not_see_finds_the_record_perfect() -> None:
    used = work()
    seen = half(used.initial.size)
    x, y = record(used)
    knows, fills = leak_of(used, seen=seen), leak_of(used, seen=seen, zeros=True)
    for distance in (Leak.squared, Leak.cosine):
        assert distance(knows, x, y).item() < 1e-8 < 0.1 < distance(fills, x, y).item()
    assert len(knows.wanted) == seen.sum() < len(fills.wanted) == seen.size


@pytest.mark.parametrize("model", ["sigmoid-lenet", "lenet5", "mlp"])
def test_labels_are_in_the_signs_of_the_last_layer(model: str) -> None:
    used = work(model)
    for site in range(3):
        true = used.site_data(used.federation.site_names[site]).y
        for seen in (None, half(used.initial.size)):
            assert labels(leak_of(used, site, seen), 1) == true


def test_a_published_clip_is_part_of_what_a_candidate_is_compared_by() -> None:
    used = work()
    x, y = record(used)
    whole = leak_of(used)
    norm = float(whole.wanted.norm())
    clipped = Leak(used.model, whole.target, limit=norm / 2)
    torch.testing.assert_close(clipped.gradients(x, y).norm().item(), norm / 2, rtol=1e-5, atol=0)
    assert torch.equal(Leak(used.model, whole.target, limit=2 * norm).gradients(x, y), whole.gradients(x, y))


@pytest.mark.parametrize(
    ("records", "epochs", "batch", "reason"),
    [(1, 5, 1, "sites make 5"), (4, 1, 1, "sites make 4"), (16, 1, 16, "batches of 8, and sites have 16")],
)
def test_more_than_one_small_step_is_refused(records: int, epochs: int, batch: int, reason: str) -> None:
    train = f"{{epochs: {epochs}, batch_size: {batch}}}"
    with pytest.raises(Unsuitable, match=reason):
        batch_of(Federation.parse(f"sites: 3\ntask: {{partition: {{records: {records}}}, train: {train}}}"))


# Methods


@pytest.mark.parametrize("share", [1, 2])
def test_dlg_recovers_images_also_from_half_of_the_coordinates(share: int) -> None:
    """MNIST where there is a data folder; a start that fails is seen to fail, so one more is made."""
    used = work(dataset="mnist" if os.environ.get("FL_PRIVACY_DATA") else "digits")
    shape = (1, *used.federation.task.data_set.shape)
    for site in range(2):
        seen = None if share == 1 else half(used.initial.size)
        made = pixels.dlg(leak_of(used, site, seen), shape, CLASSES, torch.Generator().manual_seed(site))
        original = record(used, site)[0].numpy()
        assert quality.ssim(made.clamp(0, 1).numpy(), original)[0] > 0.9


def test_matching_zeros_hides_the_image_from_the_attacker_that_does_it() -> None:
    used = work()
    y, shape = record(used)[1], (1, *used.federation.task.data_set.shape)
    leak = leak_of(used, seen=half(used.initial.size), zeros=True)
    made = pixels.idlg(leak, shape, y, torch.Generator().manual_seed(0)).clamp(0, 1).numpy()
    assert quality.ssim(made, record(used)[0].numpy())[0] < 0.5


@examples(30)
@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(2, 30))
def test_an_outer_product_is_solved_from_the_entries_that_tell(seed: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    errors, x = rng.normal(size=rows), rng.random(columns)
    seen, errors_seen = rng.random((rows, columns)) < 0.5, rng.random(rows) < 0.5
    found = analytic.rank_one(errors[:, None] * x, seen, np.where(errors_seen, errors, 0.0), errors_seen)
    told = (seen & errors_seen[:, None]).any(axis=0)
    np.testing.assert_allclose(found[told], x[told], rtol=1e-6, atol=1e-9)
    assert not np.isinf(found).any()


def test_half_of_a_dense_layer_gives_the_record_away_exactly() -> None:
    used = work("mlp")
    assert analytic.applies(used.model)
    assert not analytic.applies(work("lenet5").model)
    found = analytic.recover(leak_of(used, seen=half(used.initial.size)), (1, 1, 8, 8))
    np.testing.assert_allclose(found, record(used)[0].numpy(), atol=1e-3)


def test_priors_limit_what_rog_and_ggl_reach_and_gradients_guide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On held-out digits; another image of the same kind is what a blind guess gives."""
    monkeypatch.setattr("attacks.inversion.priors.GENERATOR_STEPS", 600)
    used = work()
    held_out = used.test
    priors = learn(held_out, CLASSES, seed=0)
    x, y = record(used)
    leak, original, shape = leak_of(used), x.numpy(), tuple(x.shape)
    blind = quality.mse(held_out.x.astype(np.float64), original).mean()
    generator = torch.Generator().manual_seed(0)
    for made, best in (
        (latent.rog(leak, shape, y, priors, generator), latent.rog_best(x, priors)),
        (latent.ggl(leak, shape, y, priors, generator), latent.ggl_best(x, y, priors)),
    ):
        for picture in (best, made):
            assert quality.mse(picture.detach().numpy(), original)[0] < blind / 2


def test_descent_finds_the_minimum_of_a_bent_valley() -> None:
    def rosenbrock(x: torch.Tensor) -> torch.Tensor:
        return (1 - x[0]).square() + 100 * (x[1] - x[0].square()).square()

    found, left = descend(rosenbrock, torch.tensor([-1.2, 1.0], dtype=torch.float64), 200)
    torch.testing.assert_close(found, torch.ones(2, dtype=torch.float64), atol=1e-4, rtol=0)
    assert left < 1e-8


# Measures

PICTURES = st.integers(0, 2**32).map(lambda seed: np.random.default_rng(seed).random((2, 1, 12, 9)))


@examples(30)
@given(PICTURES, PICTURES)
def test_similarity_is_one_for_equal_pictures_only_and_has_no_direction(
    a: NDArray[np.float64], b: NDArray[np.float64]
) -> None:
    np.testing.assert_allclose(quality.ssim(a, a), 1, atol=1e-12)
    np.testing.assert_allclose(quality.ssim(a, b), quality.ssim(b, a), atol=1e-12)
    assert (quality.ssim(a, b) <= 1).all()
    assert (quality.psnr(a, a) == quality.MOST).all()


def test_known_values_of_the_measures() -> None:
    """Constant pictures have no structure: SSIM is the light's term alone."""
    low, high = np.full((1, 3, 16, 16), 0.2), np.full((1, 3, 16, 16), 0.3)
    assert quality.mse(low, high)[0] == pytest.approx(0.01)
    assert quality.psnr(low, high)[0] == pytest.approx(20)
    assert quality.ssim(low, high)[0] == pytest.approx((2 * 0.06 + 1e-4) / (0.04 + 0.09 + 1e-4))


def test_perceptual_distance_is_zero_for_equal_pictures_and_grows_with_noise() -> None:
    folder = data_folder()
    if not (folder / "lpips" / FILE).exists():
        pytest.skip("needs lpips in FL_PRIVACY_DATA")
    measure, rng = Lpips(folder), np.random.default_rng(0)
    original = work().test.x[:4].astype(np.float64)
    found = [measure((original + rng.normal(0, s, original.shape)).clip(0, 1), original).mean() for s in (0, 0.1, 0.3)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[0] < found[1] < found[2] < 2


def test_weights_of_perceptual_distance_are_never_unpickled(tmp_path: Path) -> None:
    (tmp_path / "lpips").mkdir()
    stored = io.BytesIO()
    np.savez(stored, **{"AlexNet_0/Conv_0/kernel": np.array([object()], dtype=object)})
    for content, reason in ((stored.getvalue(), "not an npz of arrays"), (b"PK", "not an npz of arrays")):
        (tmp_path / "lpips" / FILE).write_bytes(content)
        with pytest.raises(DataError, match=reason):
            Lpips(tmp_path)


def test_a_grid_is_one_picture() -> None:
    made = grid({"original": np.zeros((3, 1, 8, 8)), "dlg": np.ones((3, 1, 8, 8))})
    assert made.startswith(b"\x89PNG")


# A recorded run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = up(config(), "simulation", tmp_path_factory.mktemp("runs"))
    assert result.status == "completed", result.reason
    return Path(result.path)


def test_colluding_aggregators_join_their_coordinates(recorded: Path) -> None:
    opened = open_run(recorded)
    views = {name: opened.view(name) for name in ("aggregator-0", "aggregator-1")}
    used = work()
    for target in targets(views, used.federation):
        assert target.whole
        alone = targets({"aggregator-1": views["aggregator-1"]}, used.federation)
        (one,) = [t for t in alone if t.site == target.site]
        assert np.array_equal(one.sights[0].seen, ~half(used.initial.size))
        name = target.site or ""
        update = used.update(used.initial, used.site_data(name), name, 1)
        np.testing.assert_array_equal(target.sights[0].gradient, -update.astype(np.float64))


def test_the_evaluator_adds_the_models_of_later_rounds(recorded: Path) -> None:
    """Every round is another set of equations for the same record, which solves them all."""
    opened, used = open_run(recorded), work()
    views = {name: opened.view(name) for name in ("aggregator-0", "evaluator")}
    for target in targets(views, used.federation):
        assert [sight.round for sight in target.sights] == [1, 2]
        leak, site = Leak(used.model, target), used.federation.site_names.index(target.site or "")
        assert len(leak.wanted) == 2 * half(used.initial.size).sum()
        assert leak.squared(*record(used, site)).item() < 1e-8
    assert {len(t.sights) for t in targets({"aggregator-0": views["aggregator-0"]}, used.federation)} == {1}


@pytest.mark.e2e
def test_the_command_reports_every_measure_beside_chance_and_draws_pictures(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)
    words = ("attack", recorded, "inversion", "--observer", "aggregator-0", "--seeds", "1", "--json")
    found = json_of(cli(*words))["attacks"]["inversion"]
    measures = found["measures"]
    for method in ("dlg", "idlg"):
        ssim = measures[f"{method}_ssim"]
        assert ssim["value"] > 0.9 > ssim["chance"]
        assert ssim["groups"]["best"] == 1
        assert ssim["groups"]["zeros"] < 0.5
        assert measures[f"{method}_mse"]["value"] < measures[f"{method}_mse"]["chance"]
    for method in ("inverting", "rog", "ggl"):
        assert measures[f"{method}_mse"]["value"] < measures[f"{method}_mse"]["chance"]
        assert measures[f"{method}_ssim"]["value"] > measures[f"{method}_ssim"]["chance"]
    assert (measures["labels"]["value"], measures["labels"]["chance"]) == (1, pytest.approx(0.1))
    assert not [name for name in measures if "lpips" in name or name.startswith("analytic")]
    assert "LPIPS was not measured" in found["notes"][0]
    (picture,) = found["pictures"]
    assert (recorded / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((recorded / "attacks" / "inversion.aggregator-0.json").read_text()) == found
    assert cli("transcript", "verify", recorded).returncode == 0


def test_a_server_that_gets_sums_attacks_the_records_of_all_sites_at_once(tmp_path: Path) -> None:
    """Its gradient is the mean of the sites' at the first model, and their records explain it."""
    sums = "route: {kind: mixes, mixes: 1, trust: trusted}\nencode: {kind: rns, r: 6}\n"
    federation = Federation.parse(config().to_yaml().partition("route:")[0] + sums)
    result = up(federation, "simulation", tmp_path)
    assert result.status == "completed", result.reason
    opened, used = open_run(Path(result.path)), work()
    knowledge: Any = SimpleNamespace(federation=federation, models=Models(opened))
    (target,) = run._targets({"server": opened.view("server")}, knowledge)
    assert target.sites == federation.site_names
    assert [sight.round for sight in target.sights] == [1, 2]
    updates = [used.update(used.initial, used.site_data(name), name, 1) for name in target.sites]
    np.testing.assert_allclose(target.sights[0].gradient, -np.mean(updates, axis=0, dtype=np.float64), atol=2e-6)
    x, y = (torch.cat(parts) for parts in zip(*(record(used, site) for site in range(3)), strict=True))
    assert Leak(used.model, target).squared(x, y).item() < 1e-6
    originals, classes = score._records(target, 3, Truth(opened))
    np.testing.assert_allclose(originals, x.numpy(), atol=1e-6)
    assert classes.tolist() == y.argmax(dim=1).tolist()


@pytest.mark.e2e
def test_whoever_tracks_references_has_exact_gradients_of_a_compressed_run(tmp_path: Path) -> None:
    """The site's record explains all that both rounds of DSC showed; without the references, only the first."""
    federation = config(more="compress: {kind: dsc, p: 0.3}\n")
    result = up(federation, "simulation", tmp_path)
    assert result.status == "completed", result.reason
    opened, used = open_run(Path(result.path)), work()
    views = {name: opened.view(name) for name in ("aggregator-0", "aggregator-1", "evaluator")}
    for target in targets(views, federation):
        leak, (x, y) = Leak(used.model, target), record(used, used.federation.site_names.index(target.site or ""))
        first, second = (sight.seen for sight in target.sights)
        assert first.sum() == second.sum() == pytest.approx(0.3 * first.size, abs=2)
        assert not np.array_equal(first, second)
        assert leak.squared(x, y).item() < 1e-8
        untracked = [replace(s, gradient=s.untracked) for s in target.sights]
        errors = [Leak(used.model, Target(None, (sight,))).squared(x, y).item() for sight in untracked]
        assert errors[0] < 1e-8 < 0.01 < errors[1]
    alone = targets({"aggregator-0": views["aggregator-0"]}, federation)
    assert all((sight.seen <= half(sight.seen.size)).all() for target in alone for sight in target.sights)
