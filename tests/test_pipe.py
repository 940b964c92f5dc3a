"""The socket between ClientApp and worker: frames arrive intact, and no bytes can harm the worker."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, strategies as st

from client_app import pipe, tickets, worker
from fl_privacy.errors import FederationError, ProtocolError
from fl_privacy.ops.metrics import OFF
from fl_privacy.routes.ends import Ticket
from helpers import eventually
from profiles import examples

VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.floats(allow_nan=False)
JSON = st.dictionaries(st.text(max_size=9), VALUES, max_size=5)
TICKET = {"run": "run-1", "federation": "0" * 64, "first": 1, "last": 1}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(5)
        right.settimeout(5)
        yield left, right


def receive_bytes(data: bytes, most: int = 1000) -> tuple[dict[str, Any], bytearray]:
    """What a receiver returns for these bytes followed by a closed connection."""
    left, right = socket.socketpair()
    with right:
        right.settimeout(5)
        with left:
            left.sendall(data)
        return pipe.receive(right, most)


@given(JSON, st.binary(max_size=500))
def test_a_frame_arrives_as_sent(fields: dict[str, Any], payload: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        pipe.send(left, fields, payload)
        assert pipe.receive(right) == (fields, payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_pipe_error(data: bytes) -> None:
    try:
        fields, payload = receive_bytes(data)
    except pipe.PipeError:
        return
    assert isinstance(fields, dict)
    assert len(payload) <= 1000


@given(st.binary(max_size=300))
def test_any_text_in_a_good_frame_is_an_object_or_a_pipe_error(text: bytes) -> None:
    try:
        fields, _ = receive_bytes(pipe.HEAD.pack(len(text), 0) + text)
    except pipe.PipeError:
        return
    assert fields == json.loads(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 5,
        pipe.HEAD.pack(0, 0),
        pipe.HEAD.pack(2, 5) + b"{}abc",
        pipe.HEAD.pack(pipe.MAX_JSON + 1, 0),
        pipe.HEAD.pack(2**32 - 1, 2**64 - 1),
        pipe.HEAD.pack(2, 1001) + b"{}" + b"x" * 1001,
        pipe.HEAD.pack(2, 0) + b"[]",
        pipe.HEAD.pack(pipe.MAX_JSON, 0) + b"[" * pipe.MAX_JSON,
        pipe.HEAD.pack(5006, 0) + b'{"a":' + b"9" * 5000 + b"}",
    ],
    ids=["nothing", "half a head", "no text", "cut", "text", "overflow", "payload", "list", "nested", "digits"],
)
def test_a_malformed_frame_is_a_pipe_error(data: bytes) -> None:
    with pytest.raises(pipe.PipeError):
        receive_bytes(data)


def test_a_false_size_allocates_no_memory(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.sendall(pipe.HEAD.pack(2, 2**40))
    with pytest.raises(pipe.PipeError, match="too large"):
        pipe.receive(right, 1000)


def test_a_trickle_does_not_extend_the_timeout(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.settimeout(0.3)
    stop = threading.Event()

    def trickle() -> None:
        left.sendall(pipe.HEAD.pack(2, 1000) + b"{}")
        while not stop.wait(0.05):
            left.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            pipe.receive(right)
        assert time.monotonic() - began < 25  # the whole frame would take 50 s
        assert right.gettimeout() == 0.3
    finally:
        stop.set()
        thread.join()


class Events(list[tuple[str, dict[str, Any]]]):
    """A log that keeps its events."""

    def __call__(self, event: str, **fields: Any) -> None:
        self.append((event, fields))

    rate_limited = __call__


class Fake:
    """A site that answers at once, or raises a given error, or waits until it may go on."""

    parameters, metrics = 2**21, OFF
    largest_model = 4 * parameters

    def __init__(self) -> None:
        self.events = self.log = Events()
        self.error: Exception | None = None
        self.rounds = 1
        self.go = threading.Event()
        self.go.set()
        self.runs: list[str] = []

    def take_part(self, ticket: Ticket, model: np.ndarray | None) -> tuple[int, np.ndarray | None]:
        self.runs.append(ticket.run)
        self.go.wait(20)
        if self.error:
            raise self.error
        return self.rounds, None if model is None else model + 1


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fake, str]]:
    """A worker with a fake site, serving in a thread until its listener is closed."""
    monkeypatch.setattr(pipe, "PATIENCE", 60.0)
    fake, path = Fake(), tmp_path / "socket"
    listener = worker.listen(path)

    def serve() -> None:
        with pytest.raises(OSError, match=r"."):
            worker.serve(listener, fake)

    thread = threading.Thread(target=serve)
    thread.start()
    yield fake, str(path)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(30)
    assert not thread.is_alive()


def test_the_socket_is_for_owner_and_group_whatever_the_umask_and_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    before = os.umask(0)
    try:
        for _ in range(2):  # the second one finds the leftovers of a killed worker
            worker.listen(path).close()
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert stat.S_ISSOCK(path.stat().st_mode)
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_ticket_is_answered_with_a_status_and_an_update(site: tuple[Fake, str]) -> None:
    fake, path = site
    model = np.arange(4, dtype="<f4")
    fields, update = pipe.ask(path, TICKET, model.tobytes(), 30)
    assert fields == {"status": "done"}
    assert np.frombuffer(update, "<f4").tolist() == [1, 2, 3, 4]
    assert pipe.ask(path, TICKET, b"", 30) == ({"status": "done"}, b"")
    fake.rounds = 0
    assert pipe.ask(path, TICKET, b"", 30)[0] == {"status": "abstain"}


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "../../x"},
        {"run": "x" * 129},
        {"run": "a\n"},
        {"federation": "short"},
        {"first": 0},
        {"last": 2**40},
        {"first": "x"},
        {"epsilon": 1000},
        {"first": [[[]]]},
    ],
)
def test_a_ticket_with_any_other_request_is_refused(site: tuple[Fake, str], changes: dict[str, Any]) -> None:
    assert pipe.ask(site[1], {**TICKET, **changes}, b"", 30) == ({"status": "abstain"}, b"")


def test_a_payload_of_odd_length_is_refused(site: tuple[Fake, str]) -> None:
    assert pipe.ask(site[1], TICKET, b"xyz", 30)[0] == {"status": "abstain"}


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("PERMISSION_DENIED", "secret reason"),
        ProtocolError("DATA_LOSS", "secret reason"),
        FederationError("secret reason"),
        RuntimeError("secret reason"),
    ],
)
def test_the_reason_stays_in_the_site_s_own_log(site: tuple[Fake, str], error: Exception) -> None:
    fake, path = site
    fake.error = error
    assert pipe.ask(path, TICKET, b"", 30) == ({"status": "abstain"}, b"")
    assert "secret reason" in str(fake.events)


def hostile(path: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(path)
        connection.sendall(data)


@given(st.lists(st.binary(max_size=60), max_size=3))
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_worker_survives_any_bytes(site: tuple[Fake, str], frames: list[bytes]) -> None:
    """One worker for all examples: each must find it alive."""
    nested = pipe.HEAD.pack(pipe.MAX_JSON, 0) + b"[" * pipe.MAX_JSON
    for frame in (*frames, nested, pipe.HEAD.pack(2**32 - 1, 2**64 - 1)):
        hostile(site[1], frame)
    assert pipe.ask(site[1], TICKET, b"", 30)[0] == {"status": "done"}


@contextmanager
def idle(path: str, count: int) -> Iterator[None]:
    """Connections that send nothing."""
    with ExitStack() as held:
        for _ in range(count):
            held.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        yield


@pytest.mark.parametrize("count", [50, 2 * tickets.READING])
def test_a_ticket_is_answered_however_many_connections_are_idle(site: tuple[Fake, str], count: int) -> None:
    with idle(site[1], count):
        assert pipe.ask(site[1], TICKET, b"", 30)[0] == {"status": "done"}


def test_a_peer_that_does_not_read_its_reply_delays_nobody(site: tuple[Fake, str]) -> None:
    fake, path = site
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(path)
        pipe.send(deaf, TICKET, bytes(4 * fake.parameters))
        assert pipe.ask(path, TICKET, b"", 30)[0] == {"status": "done"}


def test_a_silent_or_unresponsive_peer_is_dropped(site: tuple[Fake, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "PATIENCE", 0.5)
    fake, path = site
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as deaf:
        silent.connect(path)
        deaf.connect(path)
        pipe.send(deaf, TICKET, bytes(4 * fake.parameters))
        eventually(lambda: sum(event == "pipe" for event, _ in fake.events) == 2)


def test_tickets_are_served_one_at_a_time_without_those_whose_client_left(site: tuple[Fake, str]) -> None:
    fake, path = site
    fake.go.clear()
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.connect(path)
        pipe.send(first, {**TICKET, "run": "first"})
        eventually(lambda: fake.runs == ["first"])
        with socket.socket(socket.AF_UNIX) as left:
            left.connect(path)
            pipe.send(left, {**TICKET, "run": "left"})
        second.connect(path)
        pipe.send(second, {**TICKET, "run": "second"})
        fake.go.set()
        for connection in (first, second):
            connection.settimeout(30)
            assert pipe.receive(connection)[0] == {"status": "done"}
    assert fake.runs == ["first", "second"]


def test_too_many_waiting_tickets_fail_at_once(site: tuple[Fake, str]) -> None:
    """One is served, eight wait, and the one that arrives last is answered before any other."""
    fake, path = site
    fake.go.clear()
    with ExitStack() as held:
        held.callback(fake.go.set)
        asking = [held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2 + tickets.WAITING)]
        for connection in asking:
            connection.connect(path)
            connection.settimeout(60)
            pipe.send(connection, TICKET)
            eventually(lambda: bool(fake.runs))
        (answered, *others), _, _ = select.select(asking, [], [], 60)
        assert pipe.receive(answered)[0] == {"status": "abstain"}
        assert not others
        assert len(fake.runs) == 1
        fake.go.set()
        for connection in asking:
            if connection is not answered:
                assert pipe.receive(connection)[0] == {"status": "done"}


def test_a_worker_that_dies_with_a_ticket_gets_it_again(tmp_path: Path) -> None:
    """It was restarted: the site does not lose its invitation."""
    listener, asked = worker.listen(tmp_path / "socket"), []

    def die_and_answer() -> None:
        for answer in (None, {"status": "done"}):
            connection, _ = listener.accept()
            with connection:
                asked.append(pipe.receive(connection))
                if answer:
                    pipe.send(connection, answer)

    thread = threading.Thread(target=die_and_answer)
    thread.start()
    with listener:
        assert pipe.ask(str(tmp_path / "socket"), TICKET, b"model", 30)[0] == {"status": "done"}
        thread.join(30)
    assert asked == [(TICKET, b"model")] * 2
