"""For tests: peers that leave calls and connections hanging, or send anything, while honest parties play rounds."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import psutil
from google.protobuf.descriptor import FieldDescriptor

from fl_privacy.addresses import parse
from fl_privacy.identity.keyring import Keyring
from fl_privacy.wire import federation_pb2 as pb, rpc
from fl_privacy.wire.stream import CHUNK, encode
from helpers import CALL

MIB = 2**20
STREAMS = 16  # that a server lets one connection have
AT_ONCE = 8  # connections that are made at the same time
CALLS = 6  # of a party at a time, when it bombards: fewer than it may have
PATIENCE = 0.3  # seconds that a bombarding party waits for an answer
UNEXPECTED = ("UNKNOWN", "INTERNAL")  # what gRPC answers for us if a servicer fails
HUNG_UP = "Internal error from Core"  # our own gRPC, if the call is over before all of it was sent
Message = Any
Requests = dict[str, list[Message]]  # what to send, by method


def requests(at: pb.RoundHeader) -> Requests:
    """A good request of every method, about this attempt; streams begin with a header and data follow."""
    where = {"run": at.run, "round": at.round, "attempt": at.attempt}
    vector = pb.VectorHeader(**where, layout=at.layout, dtype="float32", length=at.length, digest=bytes(32), floor=1)
    next_one = pb.RoundHeader()
    next_one.CopyFrom(at)
    next_one.attempt, next_one.length, next_one.parameters = "f" * 64, 64 * MIB, 64 * MIB
    data = memoryview(bytes(CHUNK))
    share = pb.ShareHeader(run=at.run, round=at.round, said=pb.ShardStatement(attempt=at.attempt), length=MIB)
    letter = pb.Letter(run=at.run, recipient="site-1", topic="topic", content=bytes(60_000))
    return {
        "Open": [pb.Chunk(round=next_one), *[data] * 4],
        "Submit": [pb.Chunk(vector=vector), data],
        "Seed": [pb.Chunk(vector=vector), data],
        "Collect": [pb.CollectRequest(**where)],
        "Fetch": [pb.FetchRequest(run=at.run, after_round=at.round, wait=60.0)],
        "Abstain": [pb.AbstainRequest(**where)],
        "Settle": [pb.SettleRequest(**where, commit=True, members=b"\1", senders=b"\1")],
        "Shard": [pb.ShardRequest(run=at.run, round=at.round)],
        "Finish": [pb.FinishRequest(run=at.run)],
        "Post": [letter],
        "Pickup": [pb.PickupRequest(run=at.run, topic="topic")],
        "Report": [pb.ReportRequest(**where, members=b"\1", senders=b"\1")],
        "Share": [pb.Chunk(share=share), data],
        "Relay": [pb.Chunk(vector=vector), data],
        "Evaluate": [pb.EvaluateRequest(run=at.run, round=at.round)],
        "Check": [rpc.health_pb2.HealthCheckRequest(service="fl_privacy.wire.Middleware")],
    }


def elsewhere(at: pb.RoundHeader) -> pb.RoundHeader:
    """The same terms in a run of another name."""
    made = pb.RoundHeader()
    made.CopyFrom(at)
    made.run = "hostile"
    return made


class Background:
    """An event loop in a thread: attacks go on there while a test plays rounds."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Awaitable[Any]) -> Future[Any]:
        async def wrapped() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL)


def channel(address: str, keys: Keyring) -> grpc.aio.Channel:
    """A connection of its own, which checks nobody."""
    key, certificate, authority = keys.read()
    options = [*rpc.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options)


def methods(*services: str) -> list[tuple[str, str]]:
    """Name and path of every method of these services."""
    return [(method, f"/{service}/{method}") for service in services for method in rpc.SERVICES[service]]


class Hanging:
    """Calls over all methods of a service, each begun and then left alone."""

    def __init__(self, address: str, keys: Keyring, service: str, wanted: Requests, count: int) -> None:
        self._address, self._keys, self._wanted, self._count = address, keys, wanted, count
        self._methods = itertools.cycle(methods(service))
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []

    async def begin(self) -> None:
        lines = [channel(self._address, self._keys) for _ in range(-(-self._count // STREAMS))]
        self._channels += lines
        for start in range(0, len(lines), AT_ONCE):
            few = lines[start : start + AT_ONCE]
            await asyncio.gather(*(self._hang(line, *next(self._methods)) for line in few for _ in range(STREAMS)))

    async def _hang(self, line: grpc.aio.Channel, method: str, path: str) -> None:
        call = line.stream_stream(path)()
        self._calls.append(call)
        with suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                for message in self._wanted[method]:
                    await call.write(raw(message))

    async def end(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*(line.close() for line in self._channels))


@contextmanager
def connected(address: str, authority: bytes, keys: Keyring | None, count: int) -> Iterator[None]:
    """So many TLS connections that say nothing after their handshake; without keys every other has not even that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.decode())
    context.set_alpn_protocols(["h2"])
    if keys is not None:
        context.load_cert_chain(keys.certificate_file, keys.key_file)
    host, port = parse(address)
    held: list[socket.socket] = []
    try:
        for number in range(count):
            held.append(socket.create_connection((host, port), CALL))
            if keys is not None or number % 2:
                with suppress(OSError):
                    held[-1] = context.wrap_socket(held[-1], server_hostname=host)
        yield
    finally:
        for line in held:
            line.close()


def raw(message: Message) -> bytes:
    if isinstance(message, bytes):
        return message
    return encode(message) if isinstance(message, pb.Chunk | memoryview) else bytes(message.SerializeToString())


ODD_NUMBERS = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
ODD_FLOATS = (0.0, -1.0, 1e-9, 1e308, float("nan"), float("inf"))
ODD_TEXTS = ("", "x", "../x", "\0", "x" * 300, "run", "fedération", "site-0")
ODD_BYTES = (b"", b"\0", b"\xff" * 32, bytes(32), bytes(5000))


class Fuzz:
    """Random and mutated requests over all methods of some services, under the certificates of several parties."""

    def __init__(self, address: str, parties: list[tuple[str, Keyring]], services: list[str], seed: int) -> None:
        self._address, self._parties, self._methods = address, parties, methods(*services)
        self._random = np.random.default_rng(seed)
        self.codes: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self.sent = 0

    async def run(self, count: int, about: Callable[[str], Requests]) -> None:
        """Send that many messages; `about` gives the requests of a role, as they are good at the time."""
        lines = [(role, channel(self._address, keys)) for role, keys in self._parties]

        async def keep_on(role: str, line: grpc.aio.Channel) -> None:
            while self.sent < count:
                await self._call(line, about(role))

        try:
            await asyncio.gather(*(keep_on(*line) for line in lines for _ in range(CALLS)))
        finally:
            await asyncio.gather(*(line.close() for _, line in lines))

    async def _call(self, line: grpc.aio.Channel, wanted: Requests) -> None:
        method, path = self._methods[self._random.integers(len(self._methods))]
        messages = [self._changed(message, wanted) for message in wanted[method]]
        self.sent += len(messages)
        call = line.stream_stream(path)(iter(messages), timeout=PATIENCE)
        try:
            async for _ in call:
                pass
        except grpc.RpcError:
            pass
        code, details = (await call.code()).name, await call.details()
        self.codes[code] += 1
        if code in UNEXPECTED and details != HUNG_UP:
            self.unexpected[f"{method}: {code}: {details}"] += 1

    def _changed(self, message: Message, wanted: Requests) -> bytes:
        kind = self._random.integers(9)
        if kind < 4 and not isinstance(message, memoryview):
            return self._odd(message)
        data = raw(message)[: 4 * 1024]
        if kind == 4:
            return self._random.bytes(int(self._random.integers(300)))
        if kind == 5:
            return data[: int(self._random.integers(len(data) + 1))]
        if kind == 6:
            other = list(wanted)[self._random.integers(len(wanted))]
            return data + raw(wanted[other][0])[:1000]
        if kind == 7:  # a field that nobody knows
            return data + b"\xfa\x3f" + bytes([0xE8, 0x07]) + bytes(1000)
        changed = bytearray(data)
        for _ in range(int(self._random.integers(4))):
            if changed:
                changed[self._random.integers(len(changed))] = self._random.integers(256)
        return bytes(changed)

    def _odd(self, message: Message) -> bytes:
        """One field has another value than a good request has."""
        made = type(message)()
        made.CopyFrom(message)
        inner = getattr(made, made.WhichOneof("part")) if isinstance(made, pb.Chunk) else made
        field = inner.DESCRIPTOR.fields[self._random.integers(len(inner.DESCRIPTOR.fields))]
        values = self._values(field)
        with suppress(ValueError):  # too large for its type
            value = values[self._random.integers(len(values))] if values else None
            if value is not None and field.is_repeated:
                getattr(inner, field.name).extend([value] * int(self._random.integers(1, 50)))
            elif value is not None:
                setattr(inner, field.name, value)
        return raw(made)

    def _values(self, field: FieldDescriptor) -> Sequence[Any]:
        kinds: dict[int, Sequence[Any]] = {
            FieldDescriptor.CPPTYPE_STRING: ODD_BYTES if field.type == FieldDescriptor.TYPE_BYTES else ODD_TEXTS,
            FieldDescriptor.CPPTYPE_DOUBLE: ODD_FLOATS,
            FieldDescriptor.CPPTYPE_BOOL: (False, True),
            FieldDescriptor.CPPTYPE_MESSAGE: (),
        }
        return kinds.get(field.cpp_type, ODD_NUMBERS)


class Memory:
    """The most resident memory that a process had while it was watched."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._idle, self.most = process, process.memory_info().rss, 0

    def look(self) -> None:
        self.most = max(self.most, self._process.memory_info().rss - self._idle)

    @contextmanager
    def watched(self) -> Iterator[Memory]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.02):
                self.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            done.set()
            thread.join()
            self.look()
