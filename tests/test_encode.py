"""`encode: rns` and `fixed`: what they demand, the range all sites agree on, what is cut off, and what plan says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from client_app.pipeline import Pipeline
from fl_privacy.cli import app
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError, FederationError, ProtocolError
from fl_privacy.rns import moduli as choose
from fl_privacy.rns.coding import Modular
from fl_privacy.routes import ROUTES
from fl_privacy.routes.server import ServerRoute
from fl_privacy.steps.base import At, Seat
from fl_privacy.steps.encode import rns
from fl_privacy.vector import Entry, Layout
from profiles import examples

D = 100
LAYOUT = Layout((Entry("w", (D,)),))


class Adding(ServerRoute):
    """A route that shows a sum."""

    kind: Literal["adding"] = "adding"
    shows: ClassVar[str] = "sum"


@pytest.fixture(autouse=True)
def _route() -> Any:
    ROUTES.add("adding", Adding)
    yield
    ROUTES._added.pop("adding")


def federation(encode: str = "{kind: rns}", more: str = "", sites: str = "4") -> Federation:
    return Federation.parse(f"sites: {sites}\nroute: {{kind: adding}}\nencode: {encode}\n{more}")


def modular(found: Federation) -> Modular:
    assert isinstance(found.coding, Modular)
    return found.coding


def pipeline(found: Federation, site: str = "site-0", state: Path | None = None) -> Pipeline:
    work: Any = SimpleNamespace(layout=LAYOUT, task=SimpleNamespace(preprocessing="public"))
    return Pipeline(Seat(found, site, work, 10, state))


def at(round: int) -> At:
    return At("run", round, f"attempt-{round}")


# Configs


def test_the_coding_fits_the_largest_cohort() -> None:
    found = modular(federation("{kind: rns, r: 3}", "cohort: 3", sites="9"))
    assert found.moduli == choose.optimal(choose.least(3, 3))
    assert (found.most, found.form, found.integers.largest) == (3, "carry-safe", 999)
    assert found.length(D) == sum((m - 1).bit_length() for m in found.moduli) * 4  # 101 columns: 4 lanes


@pytest.mark.parametrize(
    ("encode", "moduli", "form"),
    [
        ("{kind: rns, r: 2, moduli: primes, form: published}", (2, 3, 5, 7, 11), "published"),
        ("{kind: fixed, r: 2}", (1024,), "carry-safe"),
        ("{kind: fixed, r: 2, bits: 32}", (2**32,), "carry-safe"),
        ("{kind: fixed, integers: int8}", (1024,), "carry-safe"),
        ("{kind: rns, integers: int8}", choose.optimal(choose.least_for(4, 127)), "carry-safe"),
    ],
)
def test_choices_of_moduli(encode: str, moduli: tuple[int, ...], form: str) -> None:
    found = modular(federation(encode))
    assert (found.moduli, found.form) == (moduli, form)


@pytest.mark.parametrize(
    ("encode", "more", "reason"),
    [
        ("{kind: rns}", "combine: {kind: median}", "combine.kind: median needs single updates"),
        ("{kind: rns}", "combine: {kind: trimmed-mean}", "combine.kind: trimmed-mean needs single updates"),
        ("{kind: rns}", "combine: {weights: epsilon}", "combine"),
        ("{kind: rns, range: 0}", "", "encode.range"),
        ("{kind: rns, range: wide}", "", "encode.range"),
        ("{kind: rns, r: 0}", "", "encode.r"),
        ("{kind: rns, r: 17}", "", "encode.r"),
        ("{kind: rns, r: 5, integers: int8}", "", "encode.r: 5 digits, but encode.integers is int8"),
        ("{kind: rns, form: open}", "", "encode.form"),
        ("{kind: rns, moduli: [3, 5]}", "", "encode.moduli"),
        ("{kind: fixed, bits: 16}", "", "encode.bits"),
    ],
)
def test_configs_that_make_no_sense_are_refused(encode: str, more: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        federation(encode, more)
    assert reason in str(caught.value)


def test_weights_that_sites_do_not_apply_are_refused() -> None:
    sites = "{count: 4, epsilon: [1, 8]}\nprivatise: {kind: ldp}"
    with pytest.raises(ConfigError, match="whose sums have no weights; use equal"):
        federation(more="combine: {kind: fedavg, weights: epsilon}", sites=sites)


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        ("{kind: server}", "route server gives single ones"),
        ("{kind: shuffler, level: model}", "route shuffler gives single ones"),
        ("{kind: shuffler, level: parameter}", "no numbers per parameter"),
        ("{kind: shards}", "no numbers per parameter"),
    ],
)
def test_routes_that_do_not_add_up_are_refused(route: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Federation.parse(f"sites: 4\nroute: {route}\nencode: {{kind: rns}}")


def test_dsc_is_refused() -> None:
    with pytest.raises(ConfigError, match="dsc needs aggregators"):
        federation(more="compress: {kind: dsc}")


def test_sums_beyond_64_bits_are_refused_for_fixed_point_and_supported_for_residues() -> None:
    sites = "{count: 10000}"
    with pytest.raises(ConfigError, match=r"encode.r: 16 digits of 10000 sites"):
        federation("{kind: fixed, r: 16}", sites=sites)
    found = modular(federation("{kind: rns, r: 16}", sites=sites))
    update = np.linspace(-0.9, 0.9, 7, dtype=np.float32)
    packed, _ = found.encode(update, 1.0)
    total = found.decode_sum(found.add([packed, packed], 7, True), 2, 1.0)
    assert np.allclose(total.total, 2 * update, rtol=1e-6)


def test_a_config_survives_its_own_yaml() -> None:
    for encode in ("{kind: rns}", "{kind: rns, integers: int8, range: 2}", "{kind: fixed, bits: 32}"):
        found = federation(encode)
        assert Federation.parse(found.to_yaml()).digest == found.digest


# The range


@given(seed=st.integers(0, 2**32), scale=st.floats(1e-6, 1e6))
@examples(40)
def test_the_range_is_a_function_of_the_rounds_model_alone(seed: int, scale: float) -> None:
    model = (np.random.default_rng(seed).normal(size=50) * scale).astype(np.float32)
    found = modular(federation()).bound_at(model)
    largest = float(np.abs(model).max())
    assert found >= 1
    assert found > largest
    assert found == 1 or found <= 2 * largest
    assert np.log2(found) == round(np.log2(found))


def test_the_range_of_the_first_round_is_1_even_if_all_weights_are_0() -> None:
    assert modular(federation()).bound_at(np.zeros(5, np.float32)) == 1.0


def test_a_number_is_the_range_whatever_the_model_is() -> None:
    found = modular(federation("{kind: rns, range: 0.25}"))
    assert found.bound_at(np.full(5, 9, np.float32)) == 0.25


def test_a_model_that_is_not_finite_has_no_range() -> None:
    with pytest.raises(FederationError, match="not finite"):
        modular(federation()).bound_at(np.array([np.nan], np.float32))


def test_with_noise_the_range_covers_the_noisiest_site() -> None:
    found = federation(sites="{count: 4, epsilon: [0.5, 8]}\nprivatise: {kind: ldp, clip: 2.0}")
    noise = found.privatise.noise(found, 0.5)
    assert modular(found).bound == pytest.approx(2 + 6 * noise)
    drawn = np.random.default_rng(0).normal(scale=noise, size=1_000_000).astype(np.float32)
    _, cut = modular(found).encode(drawn, modular(found).bound_at(drawn))
    assert cut == 0


def test_sites_that_missed_rounds_send_the_same_integers() -> None:
    """One site trained in all rounds, one joins in the last, one lost its state: the server decodes their mean."""
    found = federation("{kind: rns, r: 5}")
    code, rng = modular(found), np.random.default_rng(4)
    models = [rng.normal(size=D, scale=scale).astype(np.float32) for scale in (0.1, 0.7, 3.0)]
    updates = [rng.normal(size=D, scale=0.3).astype(np.float32) for _ in range(3)]
    always = pipeline(found, "site-0")
    for round, model in enumerate(models[:-1], 1):
        always.inward(model, at(round))
        always.outward(updates[0], at(round))
    packed = []
    for site, update in zip((always, pipeline(found, "site-1"), pipeline(found, "site-2")), updates, strict=True):
        site.inward(models[-1], at(3))
        packed.append(site.outward(update, at(3)))
    bound = code.bound_at(models[-1])
    total = code.decode_sum(code.add(packed, D, True), 3, bound)
    assert np.abs(total.total - sum(updates)).max() <= 3 * bound * 1e-5 + 1e-6


# What is cut off


def test_what_is_cut_off_is_reported_at_the_site_and_in_the_sum() -> None:
    found = federation("{kind: rns, range: 1}")
    code = modular(found)
    update = np.zeros(D, np.float32)
    update[:3] = 5, -5, 1
    site = pipeline(found)
    site.inward(np.zeros(D, np.float32), at(1))
    packed = site.outward(update, at(1))
    assert site.notes() == {"encode": {"range": 1.0, "clamped": 0.03}}
    whole, _ = code.encode(np.zeros(D, np.float32), 1.0)
    total = code.decode_sum(code.add([packed, whole], D, True), 2, 1.0)
    assert total.clamped == pytest.approx(0.015, rel=0.01)
    assert total.total[:4] == pytest.approx([0.9999, -0.9999, 0.9999, 0])


def test_a_single_value_that_is_cut_off_shows_in_the_sum() -> None:
    """Also if its share is below the precision of the integers."""
    code = modular(federation("{kind: rns, integers: int8}"))
    update = np.zeros(100_000, np.float32)
    update[77] = 3
    packed, cut = code.encode(update, 1.0)
    assert cut == 1
    assert code.decode_sum(code.add([packed], update.size, True), 1, 1.0).clamped > 0


def test_an_update_of_a_wrong_length_is_refused() -> None:
    code = modular(federation())
    packed, _ = code.encode(np.zeros(D, np.float32), 1.0)
    with pytest.raises(ProtocolError):
        code.unpack(packed, D + 50)


def test_steps_before_it_still_work() -> None:
    found = federation(more="compress: {kind: top-k, keep: 0.1}")
    site = pipeline(found)
    site.inward(np.zeros(D, np.float32), at(1))
    packed = site.outward(np.linspace(-0.5, 0.5, D, dtype=np.float32), at(1))
    code = modular(found)
    total = code.decode_sum(code.add([packed], D, True), 1, 1.0).total
    assert np.count_nonzero(total) == 10


# Public functions


def test_the_mean_of_encoded_values() -> None:
    chosen = rns.moduli(10, 4)
    assert sum(m - 1 for m in chosen) == 47
    values = np.random.default_rng(1).uniform(-1, 1, size=(10, 30))
    sums = sum(rns.encode(row, chosen, 4) for row in values)
    exact = np.trunc(values * 1e4).sum(axis=0) / 1e4 / 10
    assert rns.decode(sums, chosen, 4, 10) == pytest.approx(exact, abs=1e-15)
    reduced = sums % np.array(chosen)[:, None]
    assert np.array_equal(rns.decode(reduced, chosen, 4, 10), rns.decode(sums, chosen, 4, 10))


@pytest.mark.parametrize("value", [1.0, -1.0, 2.0, np.nan, np.inf])
def test_values_outside_the_range_are_refused(value: float) -> None:
    with pytest.raises(FederationError, match="not in"):
        rns.encode([0.5, value], rns.moduli(2, 3), 3)


def test_the_largest_value_below_1_has_r_digits() -> None:
    for r in (1, 8, 16, 17, 18):
        chosen = rns.moduli(2, r)
        found = rns.decode(rns.encode([np.nextafter(1, 0)], chosen, r), chosen, r, 1)
        assert found[0] == pytest.approx(1 - 10.0**-r, abs=1e-15)


@pytest.mark.parametrize(
    ("sums", "n", "reason"),
    [
        ([[-1], [0]], 2, "whole numbers"),
        ([[0.5], [0]], 2, "whole numbers"),
        ([[0]], 2, "a row"),
        ([[200], [0]], 2, "larger than"),
        ([[0], [0]], 10**6, "product is too small"),
    ],
)
def test_sums_that_do_not_decode_are_refused(sums: Any, n: int, reason: str) -> None:
    with pytest.raises(FederationError, match=reason):
        rns.decode(sums, (50, 51), 2, n)


# The plan


def planned(tmp_path: Path, text: str, *words: str) -> str:
    config = tmp_path / "federation.yaml"
    config.write_text(text)
    done = CliRunner().invoke(app, ["plan", str(config), *words])
    assert done.exit_code == 0, done.output
    return done.output


CONFIG = "sites: 10\nroute: {kind: adding}\nencode: "


def test_plan_prints_bits_and_the_leak(tmp_path: Path) -> None:
    found = json.loads(planned(tmp_path, CONFIG + "{kind: rns, r: 5, form: published}", "--json"))["steps"]["rns"]
    assert (found["bits_per_parameter"], found["unary_bits_per_parameter"]) == (24, 57)
    assert found["plain_bits_per_parameter"] == 21
    assert found["leak_bits"]["together"] == pytest.approx(13.25, abs=0.01)
    assert found["leak_bits"]["single"] == pytest.approx(0.533, abs=0.001)
    text = " ".join(planned(tmp_path, CONFIG + "{kind: rns, r: 5, form: published}").split())
    assert "24 bits per parameter as numbers, 57 in unary" in text
    assert "13.3 bits per parameter more than the sum" in text


@pytest.mark.parametrize("encode", ["{kind: rns}", "{kind: fixed}"])
def test_plan_of_what_is_carry_safe_has_no_leak(tmp_path: Path, encode: str) -> None:
    (found,) = json.loads(planned(tmp_path, CONFIG + encode, "--json"))["steps"].values()
    assert found["leak_bits"] == {"form": "carry-safe", "together": 0.0, "single": 0.0}
    assert "nothing else" in planned(tmp_path, CONFIG + encode)


def test_plan_counts_packed_bytes(tmp_path: Path) -> None:
    found = json.loads(planned(tmp_path, CONFIG + "{kind: rns, r: 5}", "--json"))
    (site,) = [c for c in found["per_round"] if c["party"] == "site"]
    assert site["updates"][1] == 4 * 24 * -(-(found["parameters"] + 1) // 32)


# Accuracy


@pytest.mark.parametrize("encode", ["{kind: rns, r: 4}", "{kind: fixed, r: 4}", "{kind: rns, integers: int8}"])
def test_a_model_from_encoded_sums_is_as_accurate_as_one_from_floats(encode: str) -> None:
    """Training as in a run, on all of the digits' records; less than half a point."""
    from fl_privacy.tasks.workload import Workload

    task = "task: {dataset: digits, model: mlp, train: {epochs: 2, batch_size: 16, lr: 0.1}}\nrounds: 4"
    found = federation(encode, task)
    work, code = Workload(found), modular(found)
    plain, encoded = work.initial.copy(), work.initial.copy()
    for round in range(1, found.rounds + 1):
        for model in (plain, encoded):
            updates = [work.update(model, work.site_data(site), site, round) for site in found.site_names]
            if model is plain:
                model += np.mean(updates, axis=0)
                continue
            bound = code.bound_at(model)
            packed = [code.encode(update, bound)[0] for update in updates]
            model += code.decode_sum(code.add(packed, model.size, True), len(updates), bound).total / len(updates)
    floats, sums = work.evaluate(plain).accuracy, work.evaluate(encoded).accuracy
    assert floats is not None
    assert sums is not None
    assert floats > 0.9
    assert abs(floats - sums) <= 0.005
