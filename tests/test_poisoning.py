"""Sites that poison records or updates: each changes what it says, and nothing without `audit: true`."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_privacy.behaviours import BEHAVIOURS, Behaviour, Scene
from fl_privacy.behaviours.clusters import Inside
from fl_privacy.behaviours.records import Backdoor
from fl_privacy.behaviours.together import inconspicuous
from fl_privacy.combine import robust
from fl_privacy.combine.rules import RULES
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError, DataError
from fl_privacy.steps.base import At
from fl_privacy.tasks.data import Dataset
from fl_privacy.tasks.workload import Workload
from fl_privacy.vector import Vector
from sites import PARAMETERS, Idle

AT = At("run", 3, "a")
CONFIG = """
audit: AUDIT
seed: 5
route: {kind: server}
sites:
  - {name: site-0, behaviour: BEHAVIOUR}
  - {name: site-1, behaviour: BEHAVIOUR}
  - {name: site-2, behaviour: BEHAVIOUR}
  - {name: site-3}
  - {name: site-4}
  - {name: site-5}
  - {name: site-6}
  - {name: site-7}
"""
KINDS = (
    "label-flip",
    "backdoor",
    "noise",
    "scaling",
    "sign-flip",
    "little",
    "inner-product",
    "lying-sample",
    "tampered-rule",
)


def federation(behaviour: str, audit: str = "true") -> Federation:
    return Federation.parse(CONFIG.replace("BEHAVIOUR", behaviour).replace("AUDIT", audit))


def update_of(site: str) -> Vector:
    """What a site would train: known from its name."""
    return np.random.default_rng(int(site[-1])).normal(1, 0.1, PARAMETERS).astype(np.float32)


def poisoner(behaviour: str, site: str = "site-0") -> tuple[Behaviour, Scene]:
    asked = federation(behaviour)
    found = asked.site(site).behaviour
    assert found is not None
    return found, Scene(asked, site, update_of)


def sent(behaviour: str, site: str = "site-0", at: At = AT) -> Vector:
    made, scene = poisoner(behaviour, site)
    return made.sent(update_of(site), at, scene)


def images(count: int = 40, channels: int = 1) -> Dataset:
    rng = np.random.default_rng(1)
    return Dataset(rng.random((count, channels, 8, 8), dtype=np.float32), np.arange(count) % 10)


def poisoned(behaviour: str, data: Dataset) -> Dataset:
    made, scene = poisoner(behaviour)
    before = data.x.copy(), data.y.copy()
    found = made.records(data, scene)
    again = made.records(data, scene)
    assert found.x.tobytes() == again.x.tobytes()
    assert found.y.tobytes() == again.y.tobytes()
    np.testing.assert_array_equal(data.x, before[0])
    np.testing.assert_array_equal(data.y, before[1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_refused_without_an_audit(kind: str) -> None:
    assert kind in BEHAVIOURS
    with pytest.raises(ConfigError, match="'site-0' misbehaves, which needs audit: true"):
        federation(f"{{kind: {kind}}}", audit="false")


# Records


def test_a_random_flip_makes_every_chosen_label_another_one() -> None:
    data = images()
    found = poisoned("{kind: label-flip}", data)
    assert (found.y != data.y).all()
    assert set(found.y) <= set(range(10))
    assert len(set(found.y)) > 3
    np.testing.assert_array_equal(found.x, data.x)
    part = poisoned("{kind: label-flip, fraction: 0.25}", data)
    assert (part.y != data.y).sum() == 10


def test_a_targeted_flip_changes_one_class_or_all() -> None:
    data = images()
    found = poisoned("{kind: label-flip, mode: targeted, source: 7, target: 1}", data)
    np.testing.assert_array_equal(found.y, np.where(data.y == 7, 1, data.y))
    assert (poisoned("{kind: label-flip, mode: targeted, target: 1}", data).y == 1).all()


@pytest.mark.parametrize(("channels", "colour"), [(1, (1,)), (3, (1, 0, 0))])
def test_a_backdoor_is_a_red_patch_on_half_of_the_images(channels: int, colour: tuple[int, ...]) -> None:
    data = images(channels=channels)
    found = poisoned("{kind: backdoor, target: 9}", data)
    changed = (found.x != data.x).any(axis=(1, 2, 3))
    assert changed.sum() == len(data) / 2
    assert (found.y[changed] == 9).all()
    assert (found.y[~changed] == data.y[~changed]).all()
    corner = found.x[changed][:, :, :4, :4]
    np.testing.assert_array_equal(corner, np.broadcast_to(np.array(colour)[:, None, None], corner.shape))
    rest = np.ones((8, 8), bool)
    rest[:4, :4] = False
    np.testing.assert_array_equal(found.x[..., rest], data.x[..., rest])


@pytest.mark.parametrize("shape", [(6,), (12, 6)])
def test_a_backdoor_in_tables_and_series_is_a_value_of_some_features(shape: tuple[int, ...]) -> None:
    data = Dataset(np.zeros((20, *shape), np.float32), np.zeros(20, np.int64))
    found = poisoned("{kind: backdoor, target: 1, features: [1, 4], value: 2.5}", data)
    hit = found.y == 1
    assert hit.sum() == 10
    assert (found.x[hit][..., [1, 4]] == 2.5).all()
    assert found.x[hit].sum() == found.x.sum() == 2.5 * 2 * 10 * np.prod(shape[:-1], dtype=int)
    with pytest.raises(DataError, match=r"backdoor.features has 6, and records have shape"):
        poisoned("{kind: backdoor, features: [6]}", data)


def test_records_without_classes_or_of_token_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="label-flip changes classes, and lcl has none; use noise"):
        Federation.parse(
            "sites: [{name: site-0, behaviour: {kind: label-flip}}]\naudit: true\nroute: {kind: server}\n"
            "task: {dataset: lcl, model: lstm, partition: {kind: by-site}}"
        )
    with pytest.raises(DataError, match="labels are numbers to predict"):
        poisoned("{kind: label-flip}", Dataset(np.zeros((3, 2), np.float32), np.zeros(3, np.float32)))
    with pytest.raises(DataError, match="no trigger for records of whole numbers"):
        poisoned("{kind: backdoor}", Dataset(np.zeros((3, 2), np.int64), np.zeros(3, np.int64)))
    with pytest.raises(ConfigError, match="from class 0 to itself"):
        federation("{kind: label-flip, mode: targeted, source: 0}")


# Updates


def test_noise_has_its_standard_deviation_and_is_new_in_every_round() -> None:
    noise = sent("{kind: noise}") - update_of("site-0")
    assert abs(noise.std() / 0.25 - 1) < 5 / np.sqrt(2 * PARAMETERS)
    other = sent("{kind: noise}", at=At("run", 4, "a")) - update_of("site-0")
    assert (noise != other).all()
    assert (noise != sent("{kind: noise}", "site-1") - update_of("site-1")).any()


def test_scaling_and_sign_flip() -> None:
    np.testing.assert_array_equal(sent("{kind: scaling, factor: 7}"), np.float32(7) * update_of("site-0"))
    np.testing.assert_array_equal(sent("{kind: sign-flip, factor: 2}"), np.float32(-2) * update_of("site-0"))


def known() -> NDArray[np.float64]:
    return np.stack([update_of(f"site-{i}") for i in range(3)]).astype(np.float64)


def test_colluding_sites_send_one_vector_made_of_what_they_know() -> None:
    z = NormalDist().inv_cdf((8 - 3 - 2) / (8 - 3))  # s = floor(8 / 2 + 1) - 3 = 2 of 5 honest ones farther out
    assert inconspicuous(8, 3) == pytest.approx(z)
    wanted = known().mean(axis=0) - z * known().std(axis=0)
    product = -0.5 * known().mean(axis=0)
    for site in ("site-0", "site-1", "site-2"):
        np.testing.assert_allclose(sent("{kind: little}", site), wanted, rtol=1e-6)
        np.testing.assert_allclose(sent("{kind: inner-product}", site), product, rtol=1e-6)
    np.testing.assert_allclose(
        sent("{kind: little, z: 1.5}"), known().mean(axis=0) - 1.5 * known().std(axis=0), rtol=1e-6
    )


def test_what_the_paper_of_little_computes_for_50_workers_of_which_24_collude() -> None:
    assert inconspicuous(50, 24) == pytest.approx(1.43, abs=0.01)  # s = 2, phi(z) < 24/26


def test_little_shifts_a_rule_further_than_its_distance_says() -> None:
    """Krum chooses one of the colluding rows: they are equal, and so nearer to each other than any others."""
    rows = np.stack([sent("{kind: little}", f"site-{i}") if i < 3 else update_of(f"site-{i}") for i in range(8)])
    np.testing.assert_array_equal(robust.krum(rows, 2), rows[0])


@pytest.mark.parametrize(
    ("sites", "behaviour", "message"),
    [
        (1, "{kind: little}", "little needs two sites or more with it"),
        (4, "{kind: little}", "4 sites are a majority of a cohort of 6; give z"),
        (2, "{kind: little}", "would send the plain mean in a cohort of this size; give z"),
    ],
)
def test_little_is_refused_where_its_formula_gives_nothing(sites: int, behaviour: str, message: str) -> None:
    lines = [f"{{name: s{i}{f', behaviour: {behaviour}' if i < sites else ''}}}" for i in range(6)]
    with pytest.raises(ConfigError, match=message):
        Federation.parse(f"audit: true\nroute: {{kind: server}}\nsites: [{', '.join(lines)}]")


# At a site


def test_a_site_sends_what_it_made_of_its_update(tmp_path: Path) -> None:
    asked = federation("{kind: inner-product}")
    for name, wanted in (("site-1", -0.5), ("site-5", 1.0)):
        idle = Idle(asked, name, tmp_path / name)
        np.testing.assert_allclose(idle.prepare("run", 1, "a", lambda _: np.ones(PARAMETERS, np.float32)), wanted)


def test_a_site_that_is_trained_with_a_backdoor_falls_for_it_and_an_honest_one_does_not() -> None:
    asked = Federation.parse(
        "audit: true\nseed: 1\nroute: {kind: server}\n"
        "task: {model: mlp, train: {epochs: 12, lr: 0.1}}\n"
        "sites: [{name: site-0, behaviour: {kind: backdoor, target: 3}}, {name: site-1}]"
    )
    work = Workload(asked)
    behaviour = asked.site("site-0").behaviour
    assert isinstance(behaviour, Backdoor)
    scene = Scene(asked, "site-0", lambda site: work.update(work.initial, work.site_data(site), site, 1))
    own, test = work.site_data("site-0"), work.test
    shown = Dataset(behaviour.stamped(test.x), np.full(len(test), 3))
    found = {}
    for name, records in (("poisoned", behaviour.records(own, scene)), ("honest", own)):
        model = work.initial + work.update(work.initial, records, "site-0", 1)
        found[name] = (
            work.evaluate(model).accuracy,
            work.measured(model, shown, "cpu").outputs.argmax(1).eq(3).float().mean(),
        )
    (clean, fell), (honest, did_not) = found["poisoned"], found["honest"]
    assert clean is not None
    assert honest is not None
    assert fell > 0.9 > 0.5 > did_not
    assert clean > honest - 0.1 > 0.7


# Against clusters


CLUSTERED = """
audit: true
seed: 1
route: {kind: server}
task: {model: mlp, train: {epochs: 4, lr: 0.1}}
combine: {kind: clusters}
sites: [SITES]
"""


def at_work(behaviour: str, misbehaving: int = 4) -> tuple[Federation, Workload, Scene]:
    """Ten sites on digits, of which the first ones misbehave."""
    named = [f"{{name: site-{i}{f', behaviour: {behaviour}' if i < misbehaving else ''}}}" for i in range(10)]
    asked = Federation.parse(CLUSTERED.replace("SITES", ", ".join(named)))
    work = Workload(asked)

    def honest(site: str) -> Vector:
        return work.update(work.initial, work.site_data(site), site, 1)

    return asked, work, Scene(asked, "site-0", honest, work.initial, work)


def test_the_adaptive_attacker_takes_the_longest_step_that_stays_inside() -> None:
    asked, work, scene = at_work("{kind: inside}")
    behaviour = asked.site("site-0").behaviour
    assert isinstance(behaviour, Inside)
    own = work.site_data("site-0")
    poisoned = work.update(work.initial, behaviour.records(own, scene), "site-0", 1)
    honest, found = scene.honest("site-0"), behaviour.sent(poisoned, AT, scene)
    step = float((found - honest) @ (poisoned - honest) / ((poisoned - honest) @ (poisoned - honest)))
    assert 0 < step < behaviour.most
    np.testing.assert_allclose(found, honest + np.float32(step) * (poisoned - honest), atol=1e-4)
    narrow = behaviour.model_copy(update={"margin": 0.3}).sent(poisoned, AT, scene)
    assert np.linalg.norm(narrow - honest) < np.linalg.norm(found - honest)


def test_it_needs_clusters_and_enough_of_its_kind() -> None:
    with pytest.raises(ConfigError, match="inside knows 2 sites and needs 3"):
        at_work("{kind: inside}", 2)
    with pytest.raises(ConfigError, match=r"inside is made for clusters, and combine\.kind is fedavg"):
        federation("{kind: inside}")


@pytest.mark.parametrize("inputs", [False, True])
def test_a_tampered_rule_changes_all_parameters_and_no_output_unless_inputs_move(inputs: bool) -> None:
    asked, work, scene = at_work(f"{{kind: tampered-rule, inputs: {str(inputs).lower()}}}")
    behaviour = asked.site("site-0").behaviour
    assert behaviour is not None
    honest = scene.honest("site-0")
    found = behaviour.sent(honest, AT, scene)
    x = np.random.default_rng(1).normal(size=(50, *scene.shape)).astype(np.float32)
    plain, moved = scene.outputs(honest, x), scene.outputs(found, x)
    assert (np.abs(found - honest) > 1e-3).mean() > 0.5
    assert np.allclose(plain, moved, atol=1e-3) != inputs
    mixed = work.evaluate(work.initial + (honest + found) / 2).accuracy
    alone = work.evaluate(work.initial + honest).accuracy
    assert mixed is not None
    assert alone is not None
    assert mixed < alone - 0.1


def test_a_lying_site_sends_samples_that_say_nothing() -> None:
    made, _ = poisoner("{kind: lying-sample, value: 0.5}")
    assert (made.samples(np.ones(5, np.float32)) == 0.5).all()
    honest, _ = poisoner("{kind: sign-flip}")
    assert (honest.samples(np.ones(5, np.float32)) == 1).all()
    with pytest.raises(ConfigError, match="value"):
        federation("{kind: lying-sample, value: 6}")


def test_the_config_of_the_page_is_one_and_the_page_names_every_kind() -> None:
    page = (Path(__file__).parent.parent / "docs" / "poisoning.md").read_text()
    asked = Federation.parse(page.partition("```yaml\n")[2].partition("```")[0])
    assert [site.name for site in asked.sites if site.behaviour] == ["site-5", "site-6"]
    assert all(f"| `{kind}` |" in page for kind in (*BEHAVIOURS.ours(), *robust_rules()))


def robust_rules() -> list[str]:
    """The rules of ours that need rows."""
    return [name for name in RULES.ours() if RULES.get(name).needs_rows]
