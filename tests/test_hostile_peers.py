"""Peers with valid certificates, or none, against real processes: honest rounds complete, and memory stays small."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from fl_privacy.combine import mean, optimiser
from fl_privacy.config import Federation
from fl_privacy.deploy.processes import Fleet
from fl_privacy.errors import RoundFailed
from fl_privacy.files import allow_open_files
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.tls import LocalKeys
from fl_privacy.wire import client, federation_pb2 as pb, rpc
from gates import FLEET, Echo, Front, ask, dial, post
from helpers import CALL, START, Array, Deployment, Keys, collect, deploy, open_round, round_header, submit
from hostile import MIB, Background, Fuzz, Hanging, Memory, Requests, connected, elsewhere, requests

pytestmark = pytest.mark.e2e

CONFIG = "name: test\nsites: 5\ncohort: 4\nquorum: 3\nrounds: 100000\ndeadline: 20\n"
SHUFFLED = Federation.parse(CONFIG + "route: {kind: shuffler, n_min: 3}\n")
SHARDED = Federation.parse(CONFIG + "route: {kind: shards, aggregators: 2}\n")
MIDDLEWARE, EVALUATOR = "fl_privacy.wire.Middleware", "fl_privacy.wire.Evaluator"
HONEST = [1, 2, 3]  # the sites of a cohort, besides the hostile one
MEMBERS = b"\x0e"  # as bits
HOSTILE = {"site": "site-0", "server": "another-server"}
LENGTH = 500
HANGING = 1000
ALLOWED = 200 * MIB
FEW, MANY = 3_000, 100_000


@dataclass
class Target:
    """A process under attack, and honest parties who need it."""

    process: psutil.Process
    address: str
    log: Path
    keys: Keys
    service: str
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    at: pb.RoundHeader = field(default_factory=pb.RoundHeader)  # the newest attempt that honest parties work on
    turn: int = 0

    def play(self) -> None:
        """What honest parties want from it; raises unless they get all of it, and only that."""
        raise NotImplementedError

    def about(self, role: str) -> Requests:
        """What to send as this role. Every other time, a hostile server's requests are about a run of its own."""
        self.turn += role == "server"
        return requests(elsewhere(self.at) if role == "server" and self.turn % 2 else self.at)

    def party(self, role: str) -> Keyring:
        return self.keys.of(role, HOSTILE.get(role, role))

    def check(self) -> None:
        """Nothing went wrong that its operator would have to look at."""
        text = self.log.read_text(errors="replace")
        assert self.process.is_running()
        assert "Traceback" not in text, text[text.index("Traceback") :][:2000]


@dataclass
class Served(Target):
    """A middleware; the hostile site is in the cohort of every round."""

    deployment: Deployment | None = None

    @property
    def middleware(self) -> Deployment:
        assert self.deployment is not None
        return self.deployment

    def terms(self) -> dict[str, Any]:
        return {"sites": [f"site-{i}" for i in (0, *HONEST)], "cohort": 4, "quorum": 3, "deadline": 4.0}

    def send(self, rows: Array) -> None:
        for index, row in zip(HONEST, rows, strict=True):
            submit(self.middleware.site(index), self.at, row)

    def check(self) -> None:
        super().check()
        released = self.middleware.events("released")
        assert max(Counter(event["attempt"] for event in released).values()) == 1
        assert min(event["count"] for event in released) >= 3


class Shuffling(Served):
    def play(self) -> None:
        number = next(self.numbers)
        rows = np.random.default_rng(number).normal(size=(3, LENGTH)).astype(np.float32)
        self.at = open_round(self.middleware.server, round_header("honest", number, LENGTH, **self.terms()))
        self.send(rows)
        release = collect(self.middleware.server, self.at)
        if release.phase == "failed":
            raise RoundFailed(release.reason)
        assert (release.phase, release.count) in (("released", 3), ("released", 4))
        assert release.rows is not None
        assert all(np.isin(rows[:, j], release.rows[:, j]).all() for j in range(LENGTH))


@dataclass
class Averaging(Served):
    shard: Array = field(default_factory=lambda: np.zeros(LENGTH, np.float32))

    def seed(self) -> None:
        client.seed(self.middleware.party("evaluator", "evaluator").stub, "honest", 0, self.shard, CALL)

    def play(self) -> None:
        number, server = next(self.numbers), self.middleware.server
        rows = np.random.default_rng(number).normal(size=(3, LENGTH)).astype(np.float32)
        digest = server.shard(pb.ShardRequest(run="honest", round=number - 1), timeout=CALL).digest
        self.at = open_round(server, round_header("honest", number, LENGTH, shards=[digest], **self.terms()))
        self.send(rows)
        release = collect(server, self.at)
        assert release.phase == "closed"
        assert release.members[0] & MEMBERS[0] == MEMBERS[0]
        where = {"run": "honest", "round": number, "attempt": self.at.attempt}
        server.settle(pb.SettleRequest(**where, commit=True, members=MEMBERS, senders=b"\0"), timeout=CALL)
        stub = self.middleware.party("evaluator", "evaluator").stub
        header, found = client.fetch(stub, pb.FetchRequest(run="honest", newest=True), CALL)
        self.shard = optimiser.FedAvg().step(self.shard, mean.weighted(rows))
        assert header.round == number
        assert np.array_equal(found, self.shard)


class Evaluating(Target):
    def play(self) -> None:
        self.at = round_header(f"honest-{next(self.numbers) % 4}", 1, LENGTH, attempt="f" * 64)
        whom = Identity("test", "evaluator", "evaluator")
        line = rpc.channel(self.address, self.keys.of("server", "server"), whom)
        reply = rpc.evaluator(line).evaluate(pb.EvaluateRequest(run=self.at.run, round=0), timeout=CALL)
        line.close()
        assert 0 <= reply.accuracy <= 1


class Guarding(Target):
    """The gate."""

    def play(self) -> None:
        keys = self.keys.of("site", "site-1")
        with dial(self.address, keys.authority_file, keys) as line:
            assert ask(line, post(FLEET))[0] == 200


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("keys"))
    sites = (("site", f"site-{i}") for i in range(5))
    for party in (
        *sites,
        *((role, role) for role in ("server", "evaluator", "superlink")),
        ("server", HOSTILE["server"]),
    ):
        made.of(*party)
    return made


@pytest.fixture(scope="module")
def shuffler(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = deploy(tmp_path_factory.mktemp("shuffler"), keys, SHUFFLED, "shuffler")
    yield Shuffling(made.process, made.address, made.fleet.children["shuffler"].log, keys, MIDDLEWARE, deployment=made)
    made.stop()


@pytest.fixture(scope="module")
def aggregators(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Deployment]]:
    for name in ("aggregator-0", "aggregator-1"):
        keys.of("aggregator", name)
    folder = tmp_path_factory.mktemp("aggregators")
    made = [deploy(folder / str(index), keys, SHARDED, "aggregator", index) for index in range(2)]
    yield made
    for deployment in made:
        deployment.stop()


@pytest.fixture(scope="module")
def aggregator(aggregators: list[Deployment]) -> Target:
    made = aggregators[0]
    log = made.fleet.children[made.name].log
    target = Averaging(made.process, made.address, log, made.keys, MIDDLEWARE, deployment=made)
    target.seed()
    return target


@pytest.fixture(scope="module")
def evaluator(aggregators: list[Deployment], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder, keys = tmp_path_factory.mktemp("evaluator"), aggregators[0].keys
    (folder / "federation.yaml").write_text(SHARDED.to_yaml())
    own = ["--config", str(folder / "federation.yaml"), "--keys", str(keys.of("evaluator", "evaluator").folder)]
    fleet = Fleet(folder / "logs", folder / "pids")
    command = [sys.executable, "-m", "aggregator_app.evaluator", *own, "--middleware"]
    child = fleet.start("evaluator", [*command, *(made.address for made in aggregators)])
    address = str(fleet.wait_for("evaluator", "listening", START)["address"])
    yield Evaluating(psutil.Process(child.process.pid), address, child.log, keys, EVALUATOR)
    fleet.stop()


@pytest.fixture(scope="module")
def gate(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("gate")
    local = LocalKeys.open(folder, "superlink")
    echo = Echo(local)
    front = Front(keys, Fleet(folder / "logs", folder / "pids"), echo.address, local)
    front.start()
    child = front.fleet.children["gate"]
    yield Guarding(psutil.Process(child.process.pid), front.address, child.log, keys, "")
    front.fleet.stop()
    echo.close()


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The party of this name; honest parties are served before, and afterwards."""
    made: Target = request.getfixturevalue(request.param)
    made.play()
    yield made
    made.play()
    made.check()


def whole(*rest: str) -> list[Any]:
    """All but the first are for `--faults`."""
    return [pytest.param(name, marks=pytest.mark.faults) for name in rest]


@pytest.mark.parametrize("target", ["shuffler", "aggregator", "evaluator"], indirect=True)
@pytest.mark.parametrize("role", ["site", "server"])
def test_a_thousand_hanging_calls_stop_no_honest_round_and_hold_little_memory(
    target: Target, role: str, background: Background
) -> None:
    memory = Memory(target.process)
    hanging = Hanging(target.address, target.party(role), target.service, target.about(role), HANGING)
    try:
        with memory.watched():
            background.start(hanging.begin()).result(60)
            target.play()
    finally:
        background.start(hanging.end()).result(60)
    assert memory.most < ALLOWED


@pytest.mark.parametrize("target", ["shuffler", "gate", *whole("aggregator", "evaluator")], indirect=True)
@pytest.mark.parametrize("role", ["site", "", *whole("server")])
def test_a_thousand_silent_connections_stop_no_honest_round_and_hold_little_memory(target: Target, role: str) -> None:
    """With a certificate, and (the empty role) without any."""
    if allow_open_files(4096) < 4096:
        pytest.skip("too few files may be open here")
    memory, own = Memory(target.process), target.party(role) if role else None
    authority = target.keys.of("server", "server").authority_file.read_bytes()
    with memory.watched(), connected(target.address, authority, own, HANGING):
        target.play()
    assert memory.most < ALLOWED


@pytest.mark.parametrize("target", ["shuffler", "aggregator", "evaluator"], indirect=True)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=[pytest.mark.faults, pytest.mark.timeout(1800)])])
def test_random_and_mutated_messages_release_nothing_alone_or_twice(
    target: Target, count: int, background: Background
) -> None:
    """Over all methods of all services, from whoever has a certificate; every refusal is one of our own."""
    memory = Memory(target.process)
    parties = [(role, target.party(role)) for role in ("site", "server", "evaluator")]
    fuzz = Fuzz(target.address, parties, list(rpc.SERVICES), seed=count)
    with memory.watched():
        running = background.start(fuzz.run(count, target.about))
        while not running.done():
            target.play()
        running.result()
    assert fuzz.sent >= count
    assert not fuzz.unexpected, fuzz.codes
    assert memory.most < ALLOWED


@pytest.mark.parametrize("target", ["shuffler"], indirect=True)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=[pytest.mark.faults, pytest.mark.timeout(1800)])])
def test_a_server_that_sends_anything_about_its_own_run_gets_nothing_alone_or_twice(
    target: Target, count: int, background: Background
) -> None:
    """It settles rounds before they end, finishes the run, opens them again: rounds may fail, the next completes."""
    fuzz = Fuzz(target.address, [("own", target.keys.of("server", "server"))], [target.service], seed=count)
    running = background.start(fuzz.run(count, target.about))
    failed = 0
    while not running.done():
        try:
            target.play()
        except (grpc.RpcError, RoundFailed):
            failed += 1
    running.result()
    assert failed
    assert fuzz.sent >= count
    assert not fuzz.unexpected, fuzz.codes


@pytest.mark.parametrize("target", ["gate"], indirect=True)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.faults, pytest.mark.timeout(1800)])])
def test_random_and_mutated_requests_at_the_gate_stop_no_honest_one(target: Target, count: int) -> None:
    memory, random, own = Memory(target.process), np.random.default_rng(count), target.party("site")
    done = threading.Event()

    def bombard() -> None:
        for _ in range(count):
            data = bytearray(post(FLEET, 20, "Transfer-Encoding: chunked").replace("\n", "\r\n").encode())
            for _ in range(int(random.integers(6))):
                data[random.integers(len(data))] = random.integers(256)
            with ExitStack() as held:
                line = held.enter_context(dial(target.address, own.authority_file, own))
                line.sendall(bytes(data) if random.integers(3) else random.bytes(200))
        done.set()

    with memory.watched():
        threading.Thread(target=bombard, daemon=True).start()
        while not done.is_set():
            target.play()
    assert memory.most < ALLOWED


@pytest.mark.parametrize("target", ["shuffler"], indirect=True)
def test_letters_with_unknown_fields_hold_no_more_than_their_content(target: Served) -> None:
    """A field that nobody knows used to stay with a letter, beyond what a mailbox may hold."""
    memory = Memory(target.process)
    line = target.middleware.party("site", "site-0").channel
    send = line.unary_unary(f"/{MIDDLEWARE}/Post", bytes, bytes)
    letter = pb.Letter(run="honest", topic="t", recipient="site-1", content=b"x").SerializeToString()
    fat = letter + b"\xfa\x3f" + bytes([0x80, 0x80, 0x40]) + bytes(MIB)
    with memory.watched():
        for _ in range(300):
            send(fat, timeout=CALL)
    assert memory.most < ALLOWED
