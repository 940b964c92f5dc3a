"""`permute: {kind: tazza}`: the same training as FedAvg, a server that holds no plain model, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.pipeline import Pipeline
from fl_privacy.agreement.secret import CHECK_BYTES, Agreed, Seeded
from fl_privacy.agreement.terms import Terms
from fl_privacy.combine.rules import RULES
from fl_privacy.config import Federation
from fl_privacy.errors import ConfigError, FederationError
from fl_privacy.models.initial import drawn, initial, started
from fl_privacy.routes.server import odd
from fl_privacy.steps.base import At, Seat, WithOwn
from fl_privacy.steps.permute import tazza
from fl_privacy.steps.permute.shuffled import Closing, check_start, rules_of
from fl_privacy.tasks.workload import Workload
from fl_privacy.theory.forecast import forecast
from fl_privacy.vector import Vector
from server_app.strategy import MODEL, Strategy

CONFIG = Path(__file__).parent.parent / "configs" / "tazza.yaml"
SECRET = bytes(range(32))
RUN, NONCE = "run", bytes(16)


def config(**changes: Any) -> Federation:
    values = {
        "name": "test",
        "sites": 4,
        "rounds": 3,
        "task": {"dataset": "digits", "model": "mlp"},
        "permute": {"kind": "tazza"},
        "route": {"kind": "server", "mailbox": True},
        "evaluate": "sites",
        **changes,
    }
    return Federation.model_validate(values)


@dataclass
class Given:
    """A secret that was agreed on."""

    agreed_on: Agreed
    shown: list[tuple[str, int]] = field(default_factory=list)

    def agreed(self) -> Agreed:
        return self.agreed_on

    def show(self, run: str, nonce: bytes, round: int) -> None:
        self.shown.append((run, round))


def agreed(roster: str = "ab" * 32, secret: bytes = SECRET) -> Agreed:
    return Agreed(secret, Terms("test-1", 0, roster, tuple((f"site-{i}", bytes([i] * 32)) for i in range(4))))


def at(round: int, **wanted: Any) -> At:
    return At(RUN, round, f"attempt-{round}", nonce=NONCE, **wanted)


@pytest.fixture(scope="module")
def work() -> Workload:
    return Workload(config()).loaded()


def pipelines(federation: Federation, work: Workload, secrets: Given) -> dict[str, Pipeline]:
    names = federation.site_names
    return {name: Pipeline(Seat(federation, name, work, 100, None, secrets)) for name in names}


def train(federation: Federation, work: Workload, rounds: int) -> tuple[list[Vector], list[Vector]]:
    """What the server held after each round, and what the sites read in it."""
    sites, strategy = pipelines(federation, work, Given(agreed())), Strategy(federation)
    models = {MODEL: started(federation)}
    held, opened = [models[MODEL]], []
    for round in range(1, rounds + 1):
        starts = {name: site.inward(models[MODEL], at(round)) for name, site in sites.items()}
        assert len({start.tobytes() for start in starts.values()}) == 1
        opened.append(starts["site-0"])
        rows = [
            site.outward(work.update(starts[name], work.site_data(name), name, round), at(round))
            for name, site in sites.items()
        ]
        models = strategy.combine(models, np.stack(rows), [])
        held.append(models[MODEL])
    farewell = at(rounds + 1, farewell=rounds)
    return held, [*opened, sites["site-0"].inward(models[MODEL], farewell)]


def plainly(federation: Federation, work: Workload, first: Vector, rounds: int) -> Vector:
    strategy, models = Strategy(federation), {MODEL: first}
    for round in range(1, rounds + 1):
        updates = [work.update(models[MODEL], work.site_data(n), n, round) for n in federation.site_names]
        models = strategy.combine(models, np.stack(updates), [])
    return models[MODEL]


@pytest.mark.parametrize("rule", [{"kind": "fedavg"}, {"kind": "multi-krum", "f": 0, "chosen": 2}])
def test_training_gives_what_it_gives_without_it(rule: dict[str, Any], work: Workload) -> None:
    federation = config(combine=rule)
    held, opened = train(federation, work, 3)
    plain = plainly(federation, work, opened[0], 3)
    assert np.abs(opened[-1] - plain).max() < 1e-5 * np.abs(plain).max()
    assert work.evaluate(opened[-1]).accuracy == pytest.approx(work.evaluate(plain).accuracy, abs=0.01)
    assert not held[0].any()  # the server starts from nothing
    for model, read in zip(held[1:], opened[1:], strict=True):
        assert np.abs(model - read).max() > 0.1 * np.abs(read).max()
        assert np.allclose(np.sort(model), np.sort(read))
        assert work.evaluate(model).accuracy < 0.5 < work.evaluate(read).accuracy


def test_every_round_and_run_has_a_rule_of_its_own(work: Workload) -> None:
    (site, *_) = pipelines(config(), work, Given(agreed())).values()
    model, sent = np.zeros(work.layout.size, np.float32), list[bytes]()
    for run in ("run", "other"):
        for round in (1, 2):
            here = replace(at(round), run=run)
            start = site.inward(model, here)
            sent.append((site.outward(-start + np.arange(start.size), here) + model).tobytes())
    assert len(set(sent)) == 4


def test_the_published_variant_starts_from_the_model_that_the_server_holds(work: Workload) -> None:
    federation = config(permute={"kind": "tazza-published"})
    held, opened = train(federation, work, 2)
    assert np.array_equal(held[0], initial(federation))
    assert np.array_equal(opened[0], held[0])
    plain = plainly(federation, work, held[0], 2)
    assert np.abs(opened[-1] - plain).max() < 1e-5 * np.abs(plain).max()


def test_the_first_model_is_made_from_the_secret_alone(work: Workload) -> None:
    federation = config()
    one, same, other = (drawn(federation, key) for key in (SECRET, SECRET, bytes(32)))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, drawn(config(seed=1), bytes(32)))
    assert np.array_equal(other, drawn(config(seed=1), bytes(32)))  # the config's seed has no part in it
    seeded = initial(federation)
    for part in work.layout.slices.values():
        assert np.abs(one[part]).max() == pytest.approx(np.abs(seeded[part]).max(), rel=0.3)
        assert np.abs(one[part]).mean() == pytest.approx(np.abs(seeded[part]).mean(), rel=0.35)


def test_uploads_carry_a_check_value_and_sites_show_it_to_each_other(work: Workload) -> None:
    federation, secrets = config(), Given(agreed())
    sites = pipelines(federation, work, secrets)
    start = sites["site-0"].inward(np.zeros(work.layout.size, np.float32), at(1))
    sites["site-0"].outward(start, at(1))
    stamps = {site.stamp(at(1)) for site in sites.values()}
    assert secrets.shown == [(RUN, 1)]
    assert {len(stamp) for stamp in stamps} == {CHECK_BYTES} == {federation.stamp_bytes}
    others = [agreed().check_value(RUN, NONCE, 2), agreed("cd" * 32).check_value(RUN, NONCE, 1)]
    others += [agreed(secret=bytes(32)).check_value(RUN, NONCE, 1), agreed().check_value(RUN, bytes(15), 1)]
    assert len({*stamps, *others}) == 5


def test_few_with_another_check_value_are_left_out_and_a_split_ends_the_run() -> None:
    def stamps(*others: int, of: int) -> dict[str, bytes]:
        return {f"site-{i}": b"other" if i in others else b"most" for i in range(of)}

    assert odd({}, 4) == odd(stamps(of=4), 4) == frozenset()
    assert odd(stamps(2, of=4), 4) == {"site-2"}
    assert odd(stamps(1, 6, of=7), 7) == {"site-1", "site-6"}
    assert odd(stamps(2, of=3), 4) == {"site-2"}  # beside a site that is late, one liar ends no run
    assert odd(stamps(1, 5, of=6), 7) == {"site-1", "site-5"}
    assert odd(stamps(0, of=4), 100) == {"site-0"}
    for wrong, sites in (
        (stamps(0, 1, of=4), 4),
        (stamps(0, 1, 2, of=7), 7),
        (stamps(0, of=2), 4),
        (stamps(0, of=3), 10),
    ):
        with pytest.raises(FederationError, match="sites hold different secrets"):
            odd(wrong, sites)


def test_a_model_that_stayed_as_it_was_is_opened_with_the_rule_that_closed_it(work: Workload) -> None:
    """One of several clusters may have no update in a round, and its model is that of an earlier one then."""
    (site, *_) = pipelines(config(rounds=4), work, Given(agreed())).values()
    start = site.inward(np.zeros(work.layout.size, np.float32), at(1)).copy()
    closed = site.outward(np.zeros_like(start), at(1))
    assert np.array_equal(site.inward(closed, at(2)), start)
    assert not np.array_equal(site.inward(closed, at(4)), start)
    assert np.array_equal(site.inward(closed, WithOwn(**vars(at(4)), made=1)), start)


def test_a_run_does_not_go_on_under_another_roster(work: Workload, tmp_path: Path) -> None:
    federation, model = config(), np.zeros(work.layout.size, np.float32)

    def site(secrets: Given) -> Pipeline:
        return Pipeline(Seat(federation, "site-0", work, 100, tmp_path, secrets))

    first = site(Given(agreed()))
    first.outward(first.inward(model, at(1)), at(1))
    site(Given(agreed())).inward(model, at(2))  # restarted
    with pytest.raises(FederationError, match=r"the roster changed.*start a new run"):
        site(Given(agreed("cd" * 32))).inward(model, at(2))
    site(Given(agreed("cd" * 32))).inward(model, replace(at(1), run="next"))


def test_reproducible_runs_have_the_same_bits_and_a_secret_that_is_none(work: Workload) -> None:
    sent = []
    for run, nonce in (("one", NONCE), ("two", bytes([1] * 16))):
        secrets = Seeded(7, lambda: agreed().terms)
        seat = Seat(config(reproducible=True), "site-0", work, 100, None, secrets)
        site, here = Pipeline(seat), replace(at(1), run=run, nonce=nonce)
        sent.append(site.outward(site.inward(np.zeros(work.layout.size, np.float32), here), here).tobytes())
    assert sent[0] == sent[1]


def test_no_rule_or_secret_is_in_what_a_site_keeps(work: Workload, tmp_path: Path) -> None:
    federation = config()
    site = Pipeline(Seat(federation, "site-0", work, 100, tmp_path, Given(agreed())))
    site.outward(site.inward(np.zeros(work.layout.size, np.float32), at(1)), at(1))
    rule = rules_of(work, "site-0").draw(agreed().of_run(RUN, NONCE), "test", 1)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    hidden = [SECRET, agreed().of_run(RUN, NONCE)]
    hidden += [axis.tobytes()[:64] for axes in rule.tensors.values() for axis in axes if axis is not None]
    assert kept
    assert not any(part in kept for part in hidden)


def test_where_every_coordinate_went_is_known_to_the_truth(work: Workload) -> None:
    (site, *_) = pipelines(config(), work, Given(agreed())).values()
    start = site.inward(np.zeros(work.layout.size, np.float32), at(1))
    sent = site.outward(np.zeros_like(start), at(1))
    assert np.array_equal(sent, start[site.truth(at(1))["order"]])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "three sites": ({"sites": 3}, "needs an agreement that bears one faulty site, so 4 sites; there are 3"),
    "a route of sums": ({"route": {"kind": "shards", "n_min": 2}}, "route shards"),
    "mixed rows": ({"route": {"kind": "shuffler", "level": "model"}}, "route shuffler hides who sent what"),
    "no mailbox": ({"route": {"kind": "server"}}, "set route.mailbox: true"),
    "a server that evaluates": ({"evaluate": "server"}, "use evaluate: sites"),
    "FedAdam": ({"combine": {"kind": "fedadam"}}, "fedadam keeps moments"),
    "FedYogi": ({"combine": {"kind": "fedyogi"}}, "fedyogi keeps moments"),
    "FLTrust": ({"combine": {"kind": "fltrust", "root": "site-0"}}, "fltrust judges the length"),
    "norm bounding": ({"combine": {"kind": "norm-bounding"}}, "norm-bounding judges the length"),
    "centred clipping": ({"combine": {"kind": "centred-clipping"}}, "centred-clipping judges the length"),
    "half a step": ({"combine": {"kind": "fedavg", "lr": 0.5}}, "combine.lr: 0.5 would mix two orders"),
    "moments of clusters": (
        {"combine": {"kind": "clusters", "rule": {"kind": "fedadam"}}},
        "combine.rule.kind: fedadam",
    ),
    "half a step of clusters": (
        {"combine": {"kind": "clusters", "rule": {"kind": "fedavg", "lr": 0.5}}},
        "combine.rule.lr: 0.5 would mix two orders",
    ),
    "top-k": ({"compress": {"kind": "top-k", "keep": 0.1}}, "top-k needs updates"),
    "residues": ({"encode": {"kind": "fixed"}}, "remove encode"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_follow_changing_rules_is_refused_with_the_reason(name: str) -> None:
    changes, reason = WRONG[name]
    for kind in ("tazza", "tazza-published"):
        with pytest.raises(ValueError, match=reason):
            config(**{**changes, "permute": {"kind": kind}})


def test_references_cannot_follow_them_either() -> None:
    with pytest.raises(ValueError, match=r"permute.kind: tazza needs rows|compress.kind: dsc"):
        config(compress={"kind": "dsc", "p": 0.5}, route={"kind": "shards", "n_min": 2})


def test_a_first_model_that_the_server_would_hold_is_for_the_published_variant(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(3, np.float32)}, path)
    with pytest.raises(ConfigError, match="the server would hold the plain model"):
        Federation.of(config().model_dump(mode="json") | {"init": str(path)})


def test_rules_that_do_not_translate_say_so() -> None:
    """Every rule of ours: moved rows give the moved result, or the rule says that they do not."""
    rng = np.random.default_rng(3)
    rows, by = rng.normal(size=(9, 40)).astype(np.float32), rng.normal(size=40).astype(np.float32)
    given = {"krum": {"f": 2}, "multi-krum": {"f": 2}, "bulyan": {"f": 1}, "fltrust": {"root": "a"}}
    for name in RULES.ours():
        rule = RULES.get(name).model_validate({"kind": name, **given.get(name, {})})
        if rule.translates:
            moved = rule.aggregate(rows + by, None, False) - by
            assert np.allclose(moved, rule.aggregate(rows, None, False), atol=1e-4), name


def test_a_model_that_cannot_be_permuted_stops_the_site_with_the_name_of_its_layer(work: Workload) -> None:
    from torch import Tensor, nn

    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(x.flatten(1)).sort(dim=1).values)  # type: ignore[no-any-return]

    own = Workload(config())
    own.model = Sorting()
    with pytest.raises(FederationError, match=r"permute: .*sort"):
        Closing(Seat(config(), "site-0", own, 100, None, Given(agreed())), True)


def test_the_plan_says_what_it_needs_and_how_little_it_hides() -> None:
    federation = Federation.load(CONFIG)
    said = forecast(federation, 4810, federation.route.cost(federation, 4810), 1e6)
    text = "\n".join(said.lines())
    assert "1 of 5 may be faulty" in text
    assert "needs rows with owners" in text
    assert "one colluding site opens everything" in text
    assert said.steps["tazza"].facts["hides_input"] is True
    images = config(task={"dataset": "digits", "model": "lenet5"})
    text = "\n".join(forecast(images, 10, images.route.cost(images, 10), 1e6).lines())
    assert "no position of a record moves" in text


def test_the_parts_of_an_update_travel_in_one_order() -> None:
    """Bit for bit what `tazza.apply` makes: the step adds nothing of its own."""
    federation = config()
    work = Workload(federation)
    (site, *_) = pipelines(federation, work, Given(agreed())).values()
    start = site.inward(np.zeros(work.layout.size, np.float32), at(1))
    rule = rules_of(work, "site-0").draw(agreed().of_run(RUN, NONCE), "test", 1)
    update = np.random.default_rng(0).normal(size=start.size).astype(np.float32)
    assert np.array_equal(site.outward(update, at(1)), tazza.apply(start + update, work.layout, rule))


@pytest.mark.parametrize("secret", [True, False])
def test_a_task_whose_first_model_is_no_secret_is_refused(secret: bool, tmp_path: Path) -> None:
    draws = "" if secret else "torch.manual_seed(3); "
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\nfrom fl_privacy import Task\n\n\nclass Own(Task):\n"
        f"    def model(self):\n        {draws}return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))\n\n"
        "    def data(self, site, folder):\n        raise NotImplementedError\n"
    )
    (tmp_path / "own.yaml").write_text(
        "name: own\ntask: {code: own.py}\npermute: {kind: tazza}\nroute: {kind: server, mailbox: true}\n"
        "evaluate: sites\nrounds: 1\nsites: 4\n"
    )
    federation = Federation.load(tmp_path / "own.yaml")
    if secret:
        check_start(federation)
        return
    with pytest.raises(FederationError, match=r"permute: 0.weight of the task's model is the same for every secret"):
        check_start(federation)
