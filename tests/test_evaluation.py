"""Evaluation where the data are: what a site counts, keeps and spends, and what a whole federation adds up to."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from client_app.site import Site
from commands import interrupt
from fl_privacy import vector
from fl_privacy.config import Federation
from fl_privacy.config.evaluate import exact_form, form_of, statement
from fl_privacy.config.policy import Policy, PolicyError, open_ledger
from fl_privacy.deploy.engines.engine import up
from fl_privacy.dp import gaussian, ldp
from fl_privacy.dp.ledger import Charge, compose
from fl_privacy.errors import ConfigError, DataError, ProtocolError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.models import kept
from fl_privacy.ops.metrics import OFF
from fl_privacy.round.sent import Sent
from fl_privacy.routes.ends import SiteSeat, Ticket
from fl_privacy.scores.form import Tally
from fl_privacy.scores.metrics import scores
from fl_privacy.scores.shares import added
from fl_privacy.scores.tally import log_odds
from fl_privacy.steps.base import At
from fl_privacy.tasks import train
from fl_privacy.tasks.workload import Workload
from fl_privacy.transcript import open_run, verify
from fl_privacy.transcript.events import Farewell, Row
from fl_privacy.vector import Vector
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.stream import digest
from helpers import Keys, ask_of
from server_app.evaluation import AtSites, Local

TASK = "task: {partition: {kind: dirichlet, alpha: 0.5}, train: {epochs: 1}}\n"
LOCAL = "name: local\nseed: 7\nsites: 3\nrounds: 4\nevaluate: sites\nroute: {kind: server}\n" + TASK


# Who evaluates

MANY = {"x": {"shape": [4]}, "y": {"classes": 100_000}}


@pytest.mark.parametrize(
    ("text", "sites"),
    [
        ("", False),
        ("evaluate: sites", True),
        ("evaluate: {by: sites, every: 5}", True),
        ("task: {dataset: heart-disease, partition: {kind: by-site}}", True),
        ("task: {dataset: heart-disease, partition: {kind: by-site}}\nevaluate: server", False),
        ("task: {dataset: heart-disease}", False),
    ],
)
def test_sites_evaluate_if_they_are_asked_to_or_the_data_are_their_own(text: str, sites: bool) -> None:
    federation = Federation.parse(f"sites: 3\n{text}")
    assert federation.sites_evaluate is sites
    assert Federation.parse(federation.to_yaml()) == federation


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("evaluate: nobody", "evaluate"),
        ("evaluate: {by: sites, epsilon: 1}", "privatise.kind is 'none'"),
        ("evaluate: {epsilon: 1}", "the server evaluates"),
        ("evaluate: {by: sites, every: 0}", "evaluate.every"),
        ("evaluate: {by: sites, clip: 1.0e+200}", "evaluate.clip"),
        (f"task: {{dataset: arrays, options: {json.dumps(MANY)}}}", "evaluate.by: classes: 100000 cannot be counted"),
        ("privatise: {kind: ldp}\nevaluate: {by: sites, epsilon: 1}", "sites.epsilon_total plans the whole budget"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    sites = "{count: 3, epsilon_total: 8}" if "ldp" in text else "3"
    with pytest.raises(ConfigError, match=said):
        Federation.parse(f"sites: {sites}\n{text}")


NOISY = "sites: {count: 3, epsilon: 2}\nprivatise: {kind: ldp}\n"


def test_the_manifest_says_whether_a_guarantee_covers_the_held_out_records() -> None:
    assert statement(Federation.parse("sites: 3")) == {"by": "server"}
    assert statement(Federation.parse(NOISY + "evaluate: sites"))["covered"] is False
    budget = statement(Federation.parse(NOISY + "evaluate: {by: sites, epsilon: 0.5}"))
    assert (budget["covered"], budget["epsilon"]) == (True, 0.5)


def test_a_policy_that_requires_noise_requires_it_of_counts_too() -> None:
    policy = Policy(epsilon_per_round=2.2, epsilon=50, tasks=("digits",))
    policy.check(Federation.parse(NOISY), "site-0")
    policy.check(Federation.parse(NOISY + "evaluate: {by: sites, epsilon: 0.5}"), "site-0")
    with pytest.raises(PolicyError, match="must have noise"):
        policy.check(Federation.parse(NOISY + "evaluate: sites"), "site-0")


def test_a_policy_limits_what_update_and_evaluation_of_a_round_cost_together(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("epsilon_per_round: 2.1\nepsilon: 50\ntasks: [digits]\nroutes: [server]\n")
    sites = [{"name": f"site-{i}", "epsilon": 2, "policy": str(tmp_path / "policy.yaml")} for i in range(3)]
    for epsilon, allowed in ((0.2, True), (1.0, False)):
        text = f"sites: {json.dumps(sites)}\nprivatise: {{kind: ldp}}\nroute: {{kind: server}}\n"
        here = Alone(f"{text}evaluate: {{by: sites, epsilon: {epsilon}}}", tmp_path)
        with nullcontext() if allowed else pytest.raises(PolicyError, match="per round"):
            here.site("site-0")


@pytest.mark.parametrize("route", ["{kind: server}", "{kind: shuffler}", "{kind: shards, aggregators: 4}"])
def test_plan_counts_the_bytes_of_counts_that_one_party_sends_and_another_receives(route: str) -> None:
    plain, evaluated = (Federation.parse(f"sites: 6\nevaluate: {by}\nroute: {route}") for by in ("server", "sites"))
    costs = evaluated.route.cost(evaluated, 1000)
    assert sum(c.count * c.bytes_out for c in costs) == sum(c.count * c.bytes_in for c in costs)
    more = [c.bytes_out - p.bytes_out for c, p in zip(costs, plain.route.cost(plain, 1000), strict=True)]
    assert more[-1] >= 8 * form_of(evaluated).length  # a site's, or that many for every aggregator


def test_a_server_whose_sites_evaluate_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_PRIVACY_DATA", raising=False)
    text = "sites: 4\ntask: {dataset: heart-disease, partition: {kind: by-site}}"
    federation = Federation.parse(text)
    assert AtSites(federation, None).initial["model"].size == Workload(federation).layout.size
    with pytest.raises(DataError):
        Local(federation, tmp_path).now("run", 0, AtSites(federation, None).initial)


def test_a_server_evaluates_every_so_many_rounds_and_the_final_model() -> None:
    federation = Federation.parse("sites: 3\nrounds: 5\nevaluate: {by: server, every: 2}")
    here = Local(federation, None)
    assert [round for round in range(6) if here.now("run", round, here.initial)] == [0, 2, 4, 5]


@pytest.mark.e2e
def test_the_rounds_that_an_evaluator_leaves_out_have_no_score(tmp_path: Path) -> None:
    text = "sites: 3\nrounds: 3\nevaluate: {by: server, every: 2}\ntask: {train: {epochs: 1}}\n" + ROUTES["shards"]
    result = up(Federation.parse(text), "simulation", tmp_path)
    assert result.status == "completed", result.reason
    assert result.accuracy is not None
    lines = open_run(result.path).metrics
    assert [line["round"] for line in lines if line["accuracy"] is not None] == [0, 2, 3]
    assert len(lines) == 4


# At a site


class Alone:
    """Sites of a federation without its other parties."""

    def __init__(self, text: str, folder: Path) -> None:
        self.federation, self._folder = Federation.parse(text), folder
        self.length = form_of(self.federation).length
        self.keys = Keys(folder / "keys", self.federation.name)

    def farewell(self, model: Vector, **wanted: int) -> Ticket:
        """The last exchange of a run of four rounds."""
        layout = Workload(self.federation).layout
        ask = ask_of(self.federation, self.keys, "run", 5, digest(model), layout, farewell=4, **wanted)
        return Ticket(run="run", federation=self.federation.digest, first=5, last=5, terms=ask.terms.to_json())

    def site(self, name: str) -> Site:
        state = self._folder / name
        state.mkdir(exist_ok=True)
        return Site(self.federation, name, self.keys.of("site", name), [], state=state)

    def sites(self) -> list[Site]:
        return [self.site(name) for name in self.federation.site_names]

    def at(self, round: int, attempt: str = "a", **wanted: int) -> At:
        return At("run", round, attempt, **{"counts": self.length, **wanted})

    def journal(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name / "metrics" / "run.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def trained(work: Workload) -> Vector:
    """A model after one epoch at one site."""
    return work.initial + work.update(work.initial, work.site_data("site-0"), "site-0", 1)


def test_the_counts_of_all_sites_add_up_to_the_pooled_ones_exactly(tmp_path: Path) -> None:
    here = Alone(LOCAL, tmp_path)
    work, form = Workload(here.federation), exact_form(here.federation)
    model = trained(work)
    vectors = [site.parcel(here.at(1), model).counts for site in here.sites()]
    total = added([vector for vector in vectors if vector is not None], form.length)
    pooled = work.measured(model, work.test, "cpu").tally(form)
    assert np.array_equal(total, pooled.vector)
    server, found = work.evaluate(model), scores(Tally.of(form, total))
    assert found.accuracy == server.accuracy
    assert found.loss == pytest.approx(server.loss, abs=1e-6)
    assert found.records == len(work.test)


def test_held_out_records_of_sites_are_disjoint_and_complete(tmp_path: Path) -> None:
    work = Workload(Federation.parse(LOCAL))
    parts = [work.held_out(name) for name in work.federation.site_names]
    assert sum(map(len, parts)) == len(work.test)
    pooled = np.concatenate([part.x.reshape(len(part), -1) for part in parts])
    there = work.test.x.reshape(len(work.test), -1)
    assert np.array_equal(pooled[np.lexsort(pooled.T)], there[np.lexsort(there.T)])


def test_a_site_evaluates_every_so_many_rounds_and_the_final_model(tmp_path: Path) -> None:
    here = Alone(LOCAL.replace("evaluate: sites", "evaluate: {by: sites, every: 2}"), tmp_path)
    site = here.site("site-0")
    model = Workload(here.federation).initial
    evaluated = [site.parcel(here.at(round), model).counts is not None for round in (1, 2, 3, 4)]
    assert evaluated == [True, False, True, False]
    assert site.parcel(here.at(5, farewell=4), model).counts is not None
    assert [line["model"] for line in here.journal("site-0")] == [0, 2, 4]


def test_a_server_gets_no_counts_that_the_federation_did_not_agree_on(tmp_path: Path) -> None:
    here = Alone(LOCAL, tmp_path)
    model = Workload(here.federation).initial
    assert here.site("site-0").parcel(here.at(1, counts=here.length - 1), model).counts is None
    other = Alone(LOCAL.replace("evaluate: sites", "evaluate: server"), tmp_path)
    assert other.site("site-1").parcel(other.at(1), model).counts is None


def test_a_repeated_attempt_is_one_line_in_the_site_s_journal(tmp_path: Path) -> None:
    here = Alone(LOCAL, tmp_path)
    model = Workload(here.federation).initial
    site = here.site("site-0")
    for at in (here.at(1, "a"), here.at(1, "b"), here.at(2, "c")):
        site.parcel(at, model)
    here.site("site-0").parcel(here.at(2, "d"), model)  # after a restart
    assert [line["model"] for line in here.journal("site-0")] == [0, 1]


def test_a_model_that_gives_no_numbers_costs_a_site_its_evaluation_not_the_round(tmp_path: Path) -> None:
    here = Alone(LOCAL, tmp_path)
    site = here.site("site-0")
    site._train = lambda model, at, private: model  # type: ignore[method-assign] # it would not train either
    parcel = site.parcel(here.at(1), np.full(site._work.layout.size, np.nan, np.float32))
    assert parcel.counts is None
    assert parcel.payload.size == site._work.layout.size


def test_a_middleware_cannot_choose_the_run_under_whose_name_a_site_writes(tmp_path: Path) -> None:
    federation = Federation.parse(LOCAL.replace("{kind: server}", "{kind: shuffler}"))
    work = Workload(federation)
    member = federation.route.site(
        SiteSeat(federation, work.layout, Keyring(tmp_path), [], "", "", lambda: 3, Sent(None), OFF)
    )
    header = pb.RoundHeader(run="../elsewhere", round=1, layout=work.layout.digest)
    header.layers.extend(part.stop for part in work.layout.layers)
    member._next = lambda *_: ([header], work.initial)  # type: ignore[attr-defined]
    ticket = Ticket(run="run", federation=federation.digest, first=1, last=4)
    with pytest.raises(ProtocolError, match="for another run"):
        next(iter(member.rounds(ticket, None)))
    header.run = "run"
    assert next(iter(member.rounds(ticket, None)))[0].run == "run"


# Budgets


PRIVATE = LOCAL.replace("sites: 3", "sites: {count: 3, epsilon: 2}").replace(
    "evaluate: sites", "evaluate: {by: sites, epsilon: 0.5}"
)
PRIVACY = {"record": "privatise: {kind: dpsgd}\n", "site": "privatise: {kind: ldp}\n"}


@pytest.mark.parametrize("unit", PRIVACY)
def test_noised_counts_are_charged_once_and_sent_again_as_the_same_bytes(unit: str, tmp_path: Path) -> None:
    here = Alone(PRIVATE + PRIVACY[unit], tmp_path)
    model = Workload(here.federation).initial
    site = here.site("site-0")
    first = site.parcel(here.at(1), model)
    again = site.parcel(here.at(1), model)
    restarted = here.site("site-0").parcel(here.at(1), model)
    assert first.counts is not None
    for other in (again, restarted):
        assert other.counts is not None
        assert np.array_equal(first.counts, other.counts)
        assert np.array_equal(first.payload, other.payload)
    ledger = open_ledger(here.federation, "site-0", tmp_path / "site-0")
    assert ledger.report()["charges"] == 2  # the update's and the evaluation's
    charge = site._evaluation.charge
    assert charge is not None
    assert (charge.unit, compose([charge], 1e-5)) == (unit, pytest.approx(0.5, abs=1e-3))
    other = site.parcel(here.at(1, "b"), model).counts
    assert other is not None
    assert not np.array_equal(first.counts, other)


@pytest.mark.parametrize("unit", PRIVACY)
def test_noised_counts_are_not_the_exact_ones(unit: str, tmp_path: Path) -> None:
    here = Alone(PRIVATE + PRIVACY[unit], tmp_path)
    site, work = here.site("site-0"), Workload(here.federation)
    counts = site.parcel(here.at(1), work.initial).counts
    assert counts is not None
    clean = work.measured(work.initial, work.held_out("site-0"), "cpu").tally(form_of(here.federation))
    assert np.mean(counts == clean.vector) < 0.01


@pytest.mark.parametrize("unit", PRIVACY)
@pytest.mark.parametrize("what", ["a model that gives no numbers", "no records"])
def test_with_noise_whether_counts_leave_says_nothing_of_the_records(unit: str, what: str, tmp_path: Path) -> None:
    """A server could send a model whose output is finite for all records but one."""
    here = Alone(PRIVATE + PRIVACY[unit], tmp_path)
    site, work = here.site("site-0"), Workload(here.federation)
    site._train = lambda model, at, private: np.zeros_like(model)  # type: ignore[method-assign]
    model = work.initial
    if what == "no records":
        vars(site._evaluation)["_held_out"] = work.held_out("site-0").take([])
    else:
        model = np.full_like(model, np.finfo(np.float32).max)
    counts = site.parcel(here.at(1), model).counts
    assert counts is not None
    assert open_ledger(here.federation, "site-0", tmp_path / "site-0").report()["charges"] == 2
    assert not (tmp_path / "site-0" / "metrics").exists()  # a site's own numbers are exact, and there are none


def test_an_evaluation_takes_no_budget_from_the_updates_of_the_run(tmp_path: Path) -> None:
    """The policy covers the four updates and two evaluations."""
    update, evaluation = ldp.charge(2.0, 1e-5), Charge(gaussian.sigma(0.5, 1e-5), ldp.UNIT, ldp.ADJACENCY)
    enough = compose([*[update] * 4, *[evaluation] * 2], 1e-5) + 1e-6
    limits = {"epsilon_per_round": 3, "epsilon": enough, "tasks": ["digits"], "routes": ["server"]}
    (tmp_path / "policy.yaml").write_text(json.dumps(limits))
    sites = [{"name": f"site-{i}", "epsilon": 2, "policy": str(tmp_path / "policy.yaml")} for i in range(3)]
    text = PRIVATE.replace("sites: {count: 3, epsilon: 2}", f"sites: {json.dumps(sites)}") + PRIVACY["site"]
    here = Alone(text, tmp_path)
    site, model = here.site("site-0"), Workload(here.federation).initial
    parcels = [site.parcel(here.at(round), model) for round in (1, 2, 3, 4)]
    parcels.append(site.parcel(here.at(5, farewell=4), model))
    assert [parcel.counts is not None for parcel in parcels] == [True, True, False, False, False]
    assert [parcel.payload.size for parcel in parcels] == [site._work.layout.size] * 4 + [0]
    assert open_ledger(here.federation, "site-0", tmp_path / "site-0").spent() == pytest.approx(enough, abs=1e-3)


# The farewell


def test_at_the_farewell_a_site_keeps_the_model_and_compares_it_with_one_trained_alone(tmp_path: Path) -> None:
    here = Alone(LOCAL, tmp_path)
    site, model = here.site("site-1"), trained(Workload(here.federation))
    site.parcel(here.at(1), model)  # so that it knows how long training takes
    ticket = here.farewell(model, counts=here.length)
    for _ in range(2):  # the second time as after a crash of the server
        done, reply = site.take_part(ticket, model)
        assert done == 1
        assert reply is not None
        assert reply.nbytes == 8 * here.length  # no update, only counts
    last = kept.received(tmp_path / "site-1" / "models", "run", "last")
    assert last.round == 4
    assert np.array_equal(last.model, model)
    lines = here.journal("site-1")
    assert [line["model"] for line in lines] == [0, 4, "alone"]
    assert lines[-1]["epochs"] == 4
    assert lines[-1]["records"] == lines[1]["records"]


def test_a_site_trains_no_model_alone_if_it_is_not_to(tmp_path: Path) -> None:
    here = Alone(LOCAL.replace("evaluate: sites", "evaluate: {by: sites, alone: false}"), tmp_path)
    site, model = here.site("site-1"), Workload(here.federation).initial
    site.take_part(here.farewell(model, counts=here.length), model)
    assert [line["model"] for line in here.journal("site-1")] == [4]


# Whole federations


FEDERATION = f"""
name: evaluated
seed: 7
sites: 4
cohort: 3
quorum: 3
rounds: 4
reproducible: true
audit: true
deadline: 60
evaluate: sites
{TASK}"""
ROUTES = {"shuffler": "route: {kind: shuffler, n_min: 3}", "shards": "route: {kind: shards, aggregators: 3, n_min: 3}"}


class Evaluated:
    """A finished run, with what its parties recorded."""

    def __init__(self, text: str, path: str) -> None:
        self.federation, self.path = Federation.parse(text), Path(path)
        self.run, self.work = open_run(path), Workload(self.federation)
        self.server = self.run.view("server")

    def sent(self, round: int) -> dict[str, Any]:
        """The counts that every site sent in a round, by the site's own record."""
        found = {}
        for name in self.federation.site_names:
            truth = self.run.truth(name)
            if round in truth.rounds + truth.farewells:
                found[name] = truth.round(round, self.server.attempts(round)[-1]).arrays["counts"]
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def shuffled(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Through the shuffler, interrupted after its first rounds and resumed."""
    text, config = FEDERATION + ROUTES["shuffler"], tmp_path_factory.mktemp("config") / "c.yaml"
    config.write_text(text)
    interrupted = interrupt(config, runs, "simulation", "evaluated")
    result = up(Federation.parse(text), "simulation", runs, resume=interrupted.name)
    assert result.status == "completed", result.reason
    return Evaluated(text, result.path)


@pytest.fixture(scope="module")
def sharded(runs: Path) -> Evaluated:
    text = FEDERATION + ROUTES["shards"]
    result = up(Federation.parse(text), "simulation", runs)
    assert result.status == "completed", result.reason
    return Evaluated(text, result.path)


@pytest.fixture(scope="module", params=ROUTES)
def evaluated(request: pytest.FixtureRequest) -> Evaluated:
    return request.getfixturevalue("shuffled" if request.param == "shuffler" else "sharded")


def test_there_is_one_line_per_round_also_after_an_interruption(evaluated: Evaluated) -> None:
    lines = evaluated.run.metrics
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(0 <= line["accuracy"] <= 1 for line in lines)
    assert lines[-1]["accuracy"] > 0.6


def test_the_server_s_numbers_are_those_of_the_pooled_records_of_who_took_part(evaluated: Evaluated) -> None:
    """The final model is evaluated by all sites, those of other rounds by the cohort of the next one."""
    form = exact_form(evaluated.federation)
    for line in evaluated.run.metrics:
        sent = evaluated.sent(line["round"] + 1)
        pooled = scores(Tally.of(form, added([*sent.values()], form.length)))
        assert {name: line[name] for name in pooled.line()} == pooled.line()
        assert len(sent) == (4 if line["round"] == 4 else 3)
    assert evaluated.run.metrics[-1]["records"] == len(evaluated.work.test)


def test_the_final_line_is_what_the_server_would_have_measured(shuffled: Evaluated) -> None:
    model = shuffled.server.round(5).arrays["model"]
    assert any(isinstance(event, Farewell) and event.round == 4 for event in shuffled.server.events(5))
    form, line = exact_form(shuffled.federation), shuffled.run.metrics[-1]
    pooled = shuffled.work.measured(model, shuffled.work.test, "cpu").tally(form)
    assert line["accuracy"] == shuffled.work.evaluate(model).accuracy
    assert np.array_equal(shuffled.server.round(5).arrays["counts"], pooled.vector)
    vector.load(shuffled.work.model, model, shuffled.work.layout)
    outputs, _ = train.outputs_of(shuffled.work.model, shuffled.work.test)
    exact = [roc_auc_score(shuffled.work.test.y == c, log_odds(outputs.numpy().astype(float))[:, c]) for c in range(10)]
    assert line["auroc"] == pytest.approx(np.mean(exact), abs=0.005)


def test_the_server_s_view_holds_no_score_of_a_single_site(evaluated: Evaluated) -> None:
    """Not as numbers in its record, nor as bytes in any file that it wrote."""
    form = exact_form(evaluated.federation)
    files = [path for path in evaluated.path.rglob("*") if path.is_file() and "truth" not in path.parts]
    written = {path: path.read_bytes() for path in files if "views" not in path.parts or "server" in path.parts}
    assert len(written) > 10
    assert (evaluated.server.rounds, evaluated.server.farewells) == ([1, 2, 3, 4], [5])
    for round in (1, 2, 3, 4, 5):
        sent = evaluated.sent(round)
        seen = evaluated.server.round(round).arrays["counts"]
        for name, counts in sent.items():
            own = Tally.of(form, counts)
            assert not any(np.array_equal(row, counts) for row in np.atleast_2d(seen))
            secrets = [own.block(block).tobytes() for block in ("classes", "calibration", "loss")]
            assert not [path for path, data in written.items() for secret in secrets if secret in data], name
            assert not [line for line in evaluated.run.metrics if line["loss"] == scores(own).loss]
        names = [event.name for event in evaluated.server.events(round) if isinstance(event, Row)]
        assert names == []


def test_an_audited_shuffler_recorded_who_sent_which_counts(shuffled: Evaluated) -> None:
    view = shuffled.run.view("shuffler")
    for round in view.rounds + view.farewells:
        names = [event.name for event in view.events(round) if isinstance(event, Row)]
        sent = shuffled.sent(round)
        assert np.array_equal(view.round(round).arrays["counts"], [sent[name] for name in names])


def test_an_aggregator_sees_shares_that_only_all_of_them_together_can_add(sharded: Evaluated) -> None:
    views = [sharded.run.view(f"aggregator-{k}") for k in range(3)]
    for round in views[0].rounds + views[0].farewells:
        sent = sharded.sent(round)
        names = [event.name for event in views[0].events(round) if isinstance(event, Row)]
        rows = [view.round(round).arrays["counts"] for view in views]
        for index, name in enumerate(names):
            shares = [row[index] for row in rows]
            assert np.array_equal(added(shares, len(shares[0])), sent[name])
            for share in shares:  # uniform: almost no number is small, where most counts are 0
                assert np.mean(share < 2**32) < 0.01


def test_every_site_keeps_its_own_numbers_and_the_farewell_reaches_all(evaluated: Evaluated) -> None:
    for name in evaluated.federation.site_names:
        path = evaluated.path.parent / "sites" / "evaluated" / name / "metrics" / f"{evaluated.path.name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        models = [line["model"] for line in lines]
        assert len(models) == len(set(models))
        assert models[-2:] == [4, "alone"]


def test_the_transcript_verifies(evaluated: Evaluated) -> None:
    report = verify(evaluated.path, (evaluated.path.parent / "pki" / "ca.pem").read_bytes())
    assert report.ok, report.problems
    assert evaluated.run.manifest["evaluation"]["by"] == "sites"
