"""HTTP of the gate: which requests a role may send, and forwarding them with streamed, bounded bodies."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from email.utils import formatdate

import h11

from fl_privacy.addresses import show
from fl_privacy.gate.listener import CHUNK, Stream
from fl_privacy.identity.tls import GOODBYE, HANDSHAKE
from fl_privacy.ops.metrics import OFF, Metrics
from fl_privacy.roles import ROLES

HEAD_BYTES = 16 * 1024
BODY_BYTES = 64 * 1024 * 1024  # Flower splits arrays into objects of 5 MiB, and an app bundle has at most 10 MiB
IDLE = 75.0
HEAD = 10.0
STALL = 30.0
GRACE = 60.0
SLOWEST = 1024  # bytes a second
ANSWER = 60.0
LINGER = 0.5
FRESH = 2.0  # the SuperLink closes connections after 5 idle seconds

_TARGET = re.compile(rb"/v1/(fleet|control|runtime)/[a-z0-9-]{1,64}|/(health)")
_PASSED = re.compile(
    rb"accept|accept-encoding|authorization|content-type|traceparent|tracestate|user-agent|x-flwr-client|flwr-[a-z0-9-]+"
)
_REFUSED = (b"expect", b"trailer", b"upgrade")
_OF_ONE_HOP = (b"connection", b"keep-alive", b"proxy-authenticate", b"server", b"trailer", b"upgrade")


class Refused(Exception):
    """A request that gets an error instead of being forwarded."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gone(Exception):
    """The caller left, or was too slow."""


class Away(Exception):
    """The SuperLink cannot be reached, or closed the connection."""


def check(request: h11.Request, role: str) -> None:
    """Raise unless this role may send this request."""
    names = [name for name, _ in request.headers]
    if request.http_version != b"1.1":
        raise Refused(400, "not HTTP/1.1")
    if b"content-length" in names and b"transfer-encoding" in names:
        raise Refused(400, "both content-length and transfer-encoding")
    if any(name in names for name in _REFUSED):
        raise Refused(400, "a header that is not allowed")
    if any(_PASSED.fullmatch(name) and names.count(name) > 1 for name in names):
        raise Refused(400, "a repeated header")
    found = _TARGET.fullmatch(request.target)
    methods = (b"POST",) if found and found[1] else (b"GET", b"HEAD")
    api = (found[1] or found[2]).decode() if found else ""
    if request.method not in methods or api not in ROLES[role].apis:
        raise Refused(403, f"a {role} may not send this request")
    if any(name == b"content-length" and int(value) > BODY_BYTES for name, value in request.headers):
        raise Refused(413, "body too large")


class Caller:
    """One connection of a party: its requests, one after the other."""

    def __init__(self, stream: Stream, metrics: Metrics = OFF) -> None:
        self._reader, self._writer = stream
        self._metrics = metrics
        self._http = h11.Connection(h11.SERVER, HEAD_BYTES)
        self._answered = self._head_only = False

    async def request(self) -> h11.Request | None:
        """The next request; None if there is none."""
        until = time.monotonic() + (HEAD if self._http.trailing_data[0] else IDLE)
        begun = False
        while (event := self._next()) is h11.NEED_DATA:
            try:
                await self._read(until)
            except Gone:
                return None
            if not begun:
                begun, until = True, time.monotonic() + HEAD
        if not isinstance(event, h11.Request):
            return None
        self._answered, self._head_only = False, event.method == b"HEAD"
        return event

    async def body(self) -> AsyncIterator[bytes]:
        """The request's body as it arrives."""
        began, size = time.monotonic(), 0
        while not isinstance(event := self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                size += len(event.data)
                if size > BODY_BYTES:
                    raise Refused(413, "body too large")
                yield bytes(event.data)
            elif event is h11.NEED_DATA:
                await self._read(min(time.monotonic() + STALL, began + GRACE + size / SLOWEST))
            else:
                raise Gone

    async def watch(self) -> None:
        """Return when more data arrives; raise if the caller has left, so that nobody waits for the answer."""
        data = await self._take()
        if not data:
            raise Gone
        self._http.receive_data(data)

    async def send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        self._answered = True
        try:
            if data := self._http.send(event):
                self._writer.write(data)
                self._metrics.moved("out", len(data))
                async with asyncio.timeout(STALL):
                    await self._writer.drain()
        except (OSError, TimeoutError, h11.LocalProtocolError):
            raise Gone from None

    async def refuse(self, refused: Refused) -> None:
        """Send an error as the last answer of this connection, unless another has begun; drop further input."""
        if self._answered or self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        text = str(refused).encode() + b"\n"
        headers = [("content-type", "text/plain"), ("content-length", str(len(text))), ("connection", "close")]
        headers.append(("date", formatdate(usegmt=True)))  # `preflight` compares clocks with it
        with suppress(Gone, TimeoutError):
            await self.send(h11.Response(status_code=refused.status, headers=headers))
            await self.send(h11.Data(data=b"" if self._head_only else text))
            await self.send(h11.EndOfMessage())
            async with asyncio.timeout(LINGER):
                for _ in range(16):
                    if not await self._take():
                        break

    def next(self) -> bool:
        """Whether the connection can serve another request."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def _next(self) -> object:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise Refused(error.error_status_hint, "malformed HTTP") from None

    async def _read(self, until: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                self._http.receive_data(await self._take())
        except TimeoutError:
            raise Gone from None

    async def _take(self) -> bytes:
        try:
            data = await self._reader.read(CHUNK)
        except OSError:
            raise Gone from None
        self._metrics.moved("in", len(data))
        return data


class Upstream:
    """A connection to the SuperLink."""

    def __init__(self, host: bytes, stream: Stream) -> None:
        self._host = host
        self._reader, self._writer = stream
        self._http = h11.Connection(h11.CLIENT, HEAD_BYTES)
        self._used = time.monotonic()

    @classmethod
    async def open(cls, host: str, port: int, context: ssl.SSLContext) -> Upstream:
        try:
            async with asyncio.timeout(HANDSHAKE):
                stream = await asyncio.open_connection(
                    host, port, ssl=context, limit=CHUNK, server_hostname=host, ssl_shutdown_timeout=GOODBYE
                )
        except TimeoutError:
            raise Away("timed out") from None
        except OSError as error:
            raise Away(getattr(error, "verify_message", "") or error.strerror or str(error)) from None
        return cls(show(host, port).encode(), stream)

    @property
    def usable(self) -> bool:
        fresh = time.monotonic() - self._used < FRESH and not self._reader.at_eof()
        return fresh and self._http.our_state is h11.IDLE

    async def ask(self, request: h11.Request) -> None:
        """Send the request's head with known headers only."""
        headers = [(b"host", self._host)]
        for name, value in request.headers:
            if name in (b"content-length", b"transfer-encoding") or _PASSED.fullmatch(name):
                headers.append((name, value))
        await self.send(h11.Request(method=request.method, target=request.target, headers=headers))

    async def send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        try:
            if data := self._http.send(event):
                self._writer.write(data)
                async with asyncio.timeout(ANSWER):
                    await self._writer.drain()
        except (OSError, TimeoutError, h11.LocalProtocolError):
            raise Away("connection closed") from None

    async def head(self) -> h11.Response:
        try:
            async with asyncio.timeout(ANSWER):
                while not isinstance(event := await self._event(), h11.Response):
                    if not isinstance(event, h11.InformationalResponse):
                        raise Away("connection closed")
        except TimeoutError:
            raise Away("no answer") from None
        return event

    async def body(self) -> AsyncIterator[bytes]:
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise Away("connection closed")
            yield bytes(event.data)

    def next(self) -> None:
        """Get ready for another request if both sides are done."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._used = time.monotonic()

    def close(self) -> None:
        self._writer.transport.abort()

    async def _event(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(CHUNK))
        except (OSError, h11.RemoteProtocolError):
            raise Away("connection closed") from None
        return event


async def forward(caller: Caller, upstream: Upstream, request: h11.Request, last: bool) -> None:
    """Forward one request and its answer, both streamed; `last` asks the caller to reconnect for the next."""
    await upstream.ask(request)
    feeding = asyncio.create_task(_feed(caller, upstream))
    answering = asyncio.create_task(_answer(caller, upstream, last))
    try:
        await asyncio.wait((feeding, answering), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            # The SuperLink may answer and close the connection before it has read the whole body.
            with suppress(Away):
                feeding.result()
        await answering
    finally:
        feeding.cancel()
        answering.cancel()
        await asyncio.gather(feeding, answering, return_exceptions=True)
    upstream.next()


async def _feed(caller: Caller, upstream: Upstream) -> None:
    async for data in caller.body():
        await upstream.send(h11.Data(data=data))
    await upstream.send(h11.EndOfMessage())
    await caller.watch()


async def _answer(caller: Caller, upstream: Upstream, last: bool) -> None:
    response = await upstream.head()
    headers = [(name, value) for name, value in response.headers if name not in _OF_ONE_HOP]
    if last:
        headers.append((b"connection", b"close"))
    await caller.send(h11.Response(status_code=response.status_code, headers=headers, reason=response.reason))
    async for data in upstream.body():
        await caller.send(h11.Data(data=data))
    await caller.send(h11.EndOfMessage())
