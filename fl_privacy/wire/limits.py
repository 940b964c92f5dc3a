"""What a server holds for others: before it knows them, for one connection, and for one party.

gRPC limits handshakes, streams and windows per connection, and knows nothing about parties. So every call is admitted
by the identity in its certificate before its request is read: what is not admitted holds a window and no more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from cryptography import x509

from fl_privacy.errors import ProtocolError, require
from fl_privacy.files import allow_open_files
from fl_privacy.identity.keyring import Identity
from fl_privacy.roles import ROLES
from fl_privacy.wire.stream import MAX_MESSAGE, Malformed

CONNECTIONS, CONNECTIONS_OF_SITE = 1024, 8
FILES = 128  # that stay free for other than connections
CALLS = 8  # at a time, over all connections of a party
CALLS_OF_SERVER = 64  # it may have several runs
REQUEST = 30.0  # seconds for a request to arrive, or for the header of a stream
WINDOW = 1 << 16  # bytes that a stream may send ahead

OPTIONS = [
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_metadata_size", 16 * 1024),
    # A window grows to the message that is being read, and back; gRPC must not enlarge it by itself.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW),
]
MESSAGES = [(f"grpc.max_{way}_message_length", MAX_MESSAGE) for way in ("receive", "send")]


def connections(sites: int) -> tuple[str, int]:
    """How many connections a server of so many sites accepts, handshakes included; files need some of the rest."""
    wanted = CONNECTIONS + CONNECTIONS_OF_SITE * sites
    return "grpc.max_allowed_incoming_connections", min(wanted, allow_open_files(wanted + FILES) - FILES)


class Callers:
    """The calls that are running, by party."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    @contextmanager
    def admit(self, certificate: x509.Certificate) -> Iterator[None]:
        """For the time of a call; refuses a party that has too many."""
        identity = Identity.of(certificate)
        most = CALLS_OF_SERVER if ROLES[identity.role].starts_runs else CALLS
        free = self._running[identity.uri] < most
        require(free, f"calls: {most} of {identity.uri} are already running", "RESOURCE_EXHAUSTED")
        self._running[identity.uri] += 1
        try:
            yield
        finally:
            self._running[identity.uri] -= 1
            if not self._running[identity.uri]:
                del self._running[identity.uri]


class Parts:
    """The messages of a request. gRPC's own iterator keeps the last one until the garbage collector runs."""

    def __init__(self, context: Any) -> None:
        self._read = context.read

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Any:
        part = await self._read()
        if part is grpc.aio.EOF:
            raise StopAsyncIteration
        return part


async def request_of(parts: AsyncIterator[Any]) -> Any:
    """The only message of a call."""
    try:
        async with asyncio.timeout(REQUEST):
            async for part in parts:
                require(not isinstance(part, Malformed), "request: not a message of this call")
                return part
    except TimeoutError:
        raise ProtocolError("DEADLINE_EXCEEDED", f"request: did not arrive within {REQUEST:g} s") from None
    raise ProtocolError("INVALID_ARGUMENT", "request: missing")
