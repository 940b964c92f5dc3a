"""What a middleware holds for others is bounded: before it knows them, per connection and per party."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509

from fl_privacy.addresses import parse
from fl_privacy.config import Federation
from fl_privacy.wire import federation_pb2 as pb, rpc, stream
from fl_privacy.wire.limits import CALLS, CALLS_OF_SERVER, Callers, Parts, request_of
from helpers import CALL, Deployment, Keys, deploy, eventually, open_round, refused, round_header, status

FEDERATION = "name: test\nsites: 4\ncohort: 3\nroute: {kind: shuffler, n_min: 2}\n"
MIB = 2**20


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def shuffler(keys: Keys, tmp_path: Path) -> Iterator[Deployment]:
    made = deploy(tmp_path / "shuffler", keys, Federation.parse(FEDERATION), "shuffler")
    yield made
    made.stop()


def lines(shuffler: Deployment, site: str, count: int, held: ExitStack) -> list[grpc.Channel]:
    """Connections with the certificate of one site; gRPC would share one between equal channels."""
    key, certificate, authority = shuffler.keys.of("site", site).read()
    made = []
    for _ in range(count):
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        own = [*rpc.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        made.append(grpc.secure_channel(shuffler.address, credentials, options=own))
        held.callback(made[-1].close)
    return made


def answers(shuffler: Deployment, site: int, timeout: float = CALL) -> bool:
    """Whether a call of this site is answered."""
    code = status(lambda: list(shuffler.site(site).fetch(pb.FetchRequest(run="none"), timeout=timeout)))
    return code == "NOT_FOUND"


def rss(shuffler: Deployment) -> int:
    return int(shuffler.process.memory_info().rss)


def test_six_connections_of_one_site_hold_little_memory_and_leave_none_behind(shuffler: Deployment) -> None:
    """Every stream sends a mebibyte that is no header; all of them together used to hold over 400 MiB, and kept it."""
    part = memoryview(np.zeros(stream.CHUNK, np.uint8))
    assert answers(shuffler, 1)
    idle = rss(shuffler)
    for _ in range(2):
        with ExitStack() as held:
            calls = []
            for line in lines(shuffler, "site-0", 6, held):
                submit = line.stream_unary("/fl_privacy.wire.Middleware/Submit", stream.encode, bytes)
                calls += [submit.future(iter([part]), timeout=6 * CALL) for _ in range(64)]
            codes = {call.exception().code().name for call in calls}
            assert codes <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
            assert rss(shuffler) - idle < 100 * MIB
    assert answers(shuffler, 1)


def test_a_party_that_uses_up_its_calls_is_refused_and_delays_no_other(shuffler: Deployment) -> None:
    open_round(shuffler.server, round_header("run", 1, 4))
    waiting = pb.FetchRequest(run="run", after_round=1, wait=60.0)
    with ExitStack() as held:
        calls = []
        for line in lines(shuffler, "site-0", 4, held):
            fetch = line.unary_stream("/fl_privacy.wire.Middleware/Fetch", pb.FetchRequest.SerializeToString, bytes)
            calls += [fetch(waiting, timeout=CALL) for _ in range(4)]
        eventually(lambda: sum(call.done() for call in calls) == len(calls) - CALLS)
        assert {call.code().name for call in calls if call.done()} == {"RESOURCE_EXHAUSTED"}
        assert answers(shuffler, 1)
        for call in calls:
            call.cancel()
    eventually(lambda: answers(shuffler, 0))


def test_silent_connections_keep_a_site_out_for_seconds_only(shuffler: Deployment) -> None:
    """They hold all the files that the process may open, until they fail the handshake; that used to take 2 minutes."""
    resource.prlimit(shuffler.process.pid, resource.RLIMIT_NOFILE, (shuffler.process.num_fds() + 50,) * 2)
    with ExitStack() as held:
        for _ in range(150):
            held.enter_context(socket.create_connection(parse(shuffler.address)))
        eventually(lambda: answers(shuffler, 1, timeout=2.0), 40)


def test_a_thousand_silent_connections_keep_nobody_out(shuffler: Deployment) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096:
        pytest.skip("too few files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096) if soft >= 0 else soft, hard))
    assert shuffler.process.rlimit(resource.RLIMIT_NOFILE)[0] >= 4096
    with ExitStack() as held:
        for _ in range(1000):
            held.enter_context(socket.create_connection(parse(shuffler.address)))
        assert answers(shuffler, 1)


def certificate(keys: Keys, role: str, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(keys.of(role, name).certificate_file.read_bytes())


@pytest.mark.parametrize(("role", "most"), [("site", CALLS), ("evaluator", CALLS), ("server", CALLS_OF_SERVER)])
def test_a_party_s_calls_are_counted_over_all_its_connections(keys: Keys, role: str, most: int) -> None:
    callers, one, other = Callers(), certificate(keys, role, "one"), certificate(keys, role, "other")
    with ExitStack() as running:
        for _ in range(most):
            running.enter_context(callers.admit(one))
        with refused("RESOURCE_EXHAUSTED"), callers.admit(one):
            pass
        running.enter_context(callers.admit(other))
    with callers.admit(one):
        pass


class Context:
    """A call whose messages are these."""

    def __init__(self, *messages: Any) -> None:
        self._messages = [*messages, grpc.aio.EOF]

    async def read(self) -> Any:
        if not self._messages:
            await asyncio.sleep(60)
        return self._messages.pop(0)


def test_a_request_is_its_first_message_and_must_come() -> None:
    assert asyncio.run(request_of(Parts(Context("one", "two")))) == "one"
    with refused("INVALID_ARGUMENT"):
        asyncio.run(request_of(Parts(Context())))


def test_a_request_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_privacy.wire.limits.REQUEST", 0.01)
    slow = Context()
    slow._messages.clear()
    with refused("DEADLINE_EXCEEDED"):
        asyncio.run(request_of(Parts(slow)))
