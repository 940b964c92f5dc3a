"""A server and the sites of one organisation against a site that runs the product's own code, with real aggregators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from client_app.site import Site
from fl_privacy.config import Federation
from fl_privacy.identity.roster import Member
from fl_privacy.round.sent import FOLDER
from fl_privacy.routes.cut import Cut
from fl_privacy.routes.ends import Ticket
from fl_privacy.wire import client, federation_pb2 as pb
from fl_privacy.wire.stream import digest
from helpers import CALL, Deployment, Keys, bound_to, collect, deploy, eventually, round_header, status, submit
from sites import PARAMETERS, Events, Work

pytestmark = pytest.mark.e2e

COLLUDING, VICTIM, OTHER = (0, 1, 2), 3, 4
NAMES = [f"site-{i}" for i in range(6)]
SITES = ", ".join(f"{{name: {n}, organisation: {'colluding' if i in COLLUDING else n}}}" for i, n in enumerate(NAMES))
# The floor is the default.
CONFIG = f"name: test\nsites: [{SITES}]\ncohort: 4\nquorum: 3\nrounds: 9\nroute: {{kind: shards, aggregators: 2}}\n"
HONEST = Federation.parse(CONFIG)
POLICY = "epsilon_per_round: 1\nepsilon: 1\ntasks: [digits]\nallow_plain: true\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("pki"))
    parties = [*(("site", name) for name in NAMES), ("server", "server"), ("evaluator", "evaluator")]
    for party in (*parties, *(("aggregator", f"aggregator-{k}") for k in range(2))):
        made.of(*party)
    of = {site.name: site.organisation or "" for site in HONEST.sites}
    made.members = {m.party: Member(m.role, m.name, m.key, of.get(m.name, "")) for m in made.members.values()}
    made.authority.enlist("test", made.members.values(), made.roster_file)
    return made


@pytest.fixture(scope="module")
def aggregators(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Deployment]]:
    folder = tmp_path_factory.mktemp("aggregators")
    made = [deploy(folder / str(index), keys, HONEST, "aggregator", index) for index in range(2)]
    yield made
    for deployment in made:
        deployment.stop()


@dataclass
class Run:
    """One run with a hostile server."""

    name: str
    folder: Path
    keys: Keys
    aggregators: list[Deployment]
    cut: Cut = field(default_factory=lambda: Cut(PARAMETERS, 2, HONEST.seed))
    log: Events = field(default_factory=Events)

    def __post_init__(self) -> None:
        shards = self.cut.split(np.zeros(PARAMETERS, np.float32))
        self._digests = [digest(shard) for shard in shards]
        for deployment, shard in zip(self.aggregators, shards, strict=True):
            client.seed(deployment.party("evaluator", "evaluator").stub, self.name, 0, shard, CALL)

    def ask(self, sites: tuple[int, ...], organisations: int, deadline: float = 20.0) -> list[pb.RoundHeader]:
        """Open round 1 for these sites at both aggregators, and claim that they are of so many organisations."""
        made = []
        names, size = [NAMES[i] for i in sites], len(sites)
        for deployment, length in zip(self.aggregators, self.cut.sizes(), strict=True):
            terms = {"sites": names, "cohort": size, "organisations": organisations, "number": 1, "quorum": 3}
            header = round_header(
                self.name, 1, length, layout=Work.layout.digest, shards=self._digests, deadline=deadline, **terms
            )
            client.open_round(deployment.server, bound_to(HONEST, self.keys, header), None, CALL)
            made.append(header)
        return made

    def victim(self, policy: Path | None = None) -> None:
        """The site takes part in the run, in a thread of its own."""
        own_policy = {NAMES[VICTIM]: policy}
        sites = [site.model_copy(update={"policy": own_policy.get(site.name)}) for site in HONEST.sites]
        federation, state = HONEST.model_copy(update={"sites": tuple(sites)}), self.folder / "victim"
        state.mkdir()
        addresses = [deployment.address for deployment in self.aggregators]
        own = self.keys.of("site", NAMES[VICTIM])
        site = Site(federation, NAMES[VICTIM], own, addresses, state=state, workload=Work(10), log=self.log)
        ticket = Ticket(run=self.name, federation=HONEST.digest, first=1, last=1)
        threading.Thread(target=site.take_part, args=(ticket,), daemon=True).start()

    def send(self, headers: list[pb.RoundHeader], *sites: int) -> None:
        for site in sites:
            for deployment, header in zip(self.aggregators, headers, strict=True):
                submit(deployment.site(site), header, np.full(header.length, site, np.float32), floor=1)

    def settle(self, headers: list[pb.RoundHeader], *sites: int) -> set[str]:
        """Have the round applied with the updates of these sites; what the aggregators answer."""
        chosen = sum(1 << sorted(headers[0].sites).index(NAMES[site]) for site in sites).to_bytes(1, "little")
        where = {"run": self.name, "round": 1, "attempt": headers[0].attempt}
        request = pb.SettleRequest(**where, commit=True, members=chosen, senders=b"\0")
        return {status(deployment.server.settle, request, timeout=CALL) for deployment in self.aggregators}

    def phases(self, headers: list[pb.RoundHeader]) -> set[str]:
        return {collect(d.server, header).phase for d, header in zip(self.aggregators, headers, strict=True)}

    def round(self) -> int:
        """After which round the newest shards are."""
        request = pb.FetchRequest(run=self.name, newest=True)
        found = [client.fetch(d.party("evaluator", "evaluator").stub, request, CALL)[0] for d in self.aggregators]
        return max(header.round for header in found)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, keys: Keys, aggregators: list[Deployment]) -> Iterator[Run]:
    made = Run(f"run-{abs(hash(request.node.name))}", tmp_path, keys, aggregators)
    yield made
    for deployment in aggregators:
        deployment.server.finish(pb.FinishRequest(run=made.name), timeout=CALL)


def test_the_default_floor_leaves_a_site_hidden_from_one_colluding_organisation() -> None:
    assert HONEST.floor == 3


@pytest.mark.parametrize(("organisations", "answer"), [(2, "INVALID_ARGUMENT"), (3, "PERMISSION_DENIED")])
def test_a_cohort_of_one_organisation_and_a_victim_is_not_opened_whatever_the_server_claims(
    run: Run, organisations: int, answer: str
) -> None:
    assert status(run.ask, (*COLLUDING, VICTIM), organisations) == answer
    assert run.round() == 0


def test_a_deadline_that_only_colluding_sites_keep_leaves_the_victim_s_update_unused(run: Run) -> None:
    headers = run.ask((0, 1, VICTIM, OTHER), 3, deadline=2.0)
    run.victim()
    run.send(headers, 0, 1)
    eventually(lambda: bool(run.log.events("uploaded")))
    assert run.phases(headers) == {"failed"}
    assert run.settle(headers, 0, 1, VICTIM) == {"FAILED_PRECONDITION"}
    assert run.round() == 0


def test_a_server_cannot_leave_out_the_sites_that_hide_the_victim(run: Run) -> None:
    headers = run.ask((0, 1, VICTIM, OTHER), 3)
    run.victim()
    run.send(headers, 0, 1, OTHER)
    assert run.phases(headers) == {"closed"}
    assert run.settle(headers, 0, 1, VICTIM) == {"FAILED_PRECONDITION"}
    assert run.round() == 0
    assert run.settle(headers, 0, 1, VICTIM, OTHER) == {"OK"}
    assert run.round() == 1


def test_a_site_whose_policy_wants_more_organisations_sends_nothing(run: Run) -> None:
    policy = run.folder / "policy.yaml"
    policy.write_text(POLICY + "min_cohort: 4\n")
    headers = run.ask((0, 1, VICTIM, OTHER), 3, deadline=10.0)
    run.victim(policy)
    eventually(lambda: bool(run.log.reasons), 20)
    assert "organisations: 3 in the cohort, and this site wants 4" in run.log.reasons[0]
    assert not (run.folder / "victim" / FOLDER).exists()
    assert not run.log.events("uploaded")
    run.send(headers, 0, 1, OTHER)
    assert run.settle(headers, 0, 1, VICTIM, OTHER) <= {"INVALID_ARGUMENT", "FAILED_PRECONDITION"}
    assert run.round() == 0
