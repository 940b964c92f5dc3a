"""How the gate and the relay run: arguments, a listening socket, a task per connection, a clean exit."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, cast

from fl_privacy.addresses import show
from fl_privacy.errors import FederationError, LaunchError
from fl_privacy.files import allow_open_files
from fl_privacy.identity.tls import GOODBYE, HANDSHAKE
from fl_privacy.ops.log import Log

BACKLOG = 1024
OPEN_FILES = 8192  # every connection has another one behind it
CHUNK = 64 * 1024

Handle = Callable[[socket.socket, str], Coroutine[Any, Any, None]]
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Arguments(argparse.ArgumentParser):
    """A parser that raises our own errors."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"arguments: {message}; see --help")


def listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"listen {show(host, port)}: {reason}; choose another --listen") from None


def keep_alive(sock: socket.socket) -> None:
    """Notice within about a minute if the other machine disappears."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


class _Tap:
    """A context that keeps the alert of a failed handshake."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.alert = b""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **options: Any) -> ssl.SSLObject:
        tls: Any = self._context.wrap_bio(incoming, outgoing, **options)
        shake = tls.do_handshake

        def do_handshake() -> None:
            try:
                shake()
            except (ssl.SSLWantReadError, ssl.SSLSyscallError):
                raise
            except ssl.SSLError:
                self.alert = outgoing.read()
                raise

        tls.do_handshake = do_handshake
        return cast(ssl.SSLObject, tls)


class Handshakes:
    """Those under way. If there are too many, the oldest of the same address gives way, or else the oldest of all.

    An honest caller needs milliseconds; one that only holds its place has it until others want it.
    """

    def __init__(self, of_one: int, in_all: int) -> None:
        self._of_one, self._in_all = of_one, in_all
        self._running: dict[asyncio.Timeout, str] = {}  # the oldest first

    @asynccontextmanager
    async def one(self, caller: str) -> AsyncIterator[None]:
        """A handshake with this address; TimeoutError if it had to give way."""
        self._make_room(caller)
        async with asyncio.timeout(None) as limit:
            self._running[limit] = caller
            try:
                yield
            finally:
                self._running.pop(limit, None)

    def _make_room(self, caller: str) -> None:
        same = [limit for limit, whose in self._running.items() if whose == caller]
        if len(same) >= self._of_one or len(self._running) >= self._in_all:
            oldest = same[0] if len(same) >= self._of_one else next(iter(self._running))
            del self._running[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())


async def accept_tls(sock: socket.socket, context: ssl.SSLContext) -> Stream:
    """The server's side of a handshake on an accepted socket; a refused caller learns why."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(CHUNK, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    tap: Any = _Tap(context)
    with sock.dup() as twin:
        twin.setblocking(False)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=tap, ssl_handshake_timeout=HANDSHAKE, ssl_shutdown_timeout=GOODBYE
            )
        except ssl.SSLError:
            # asyncio drops the alert, and closing on unread data would overtake it.
            with suppress(OSError):
                async with asyncio.timeout(GOODBYE):
                    await loop.sock_sendall(twin, tap.alert)
                    twin.shutdown(socket.SHUT_WR)
                    while await loop.sock_recv(twin, CHUNK):
                        pass
            raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def close(writer: asyncio.StreamWriter) -> None:
    """Close TLS properly (peers treat a bare end as an attack), but do not wait long for it."""
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(2 * GOODBYE):
            await writer.wait_closed()
    writer.transport.abort()


async def accept(listener: socket.socket, handle: Handle, log: Log) -> None:
    """Handle each connection in a task until cancelled, which cancels them too."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log("failed", reason=f"connection: {type(error).__name__}: {error}")

    listener.setblocking(False)
    log("listening", address=show(*listener.getsockname()[:2]))
    try:
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError:  # out of file descriptors, or gone before it was accepted
                await asyncio.sleep(0.1)
                continue
            keep_alive(sock)
            task = loop.create_task(handle(sock, str(peer[0])))
            tasks.add(task)
            task.add_done_callback(ended)
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(listener: socket.socket, handle: Handle, log: Log) -> None:
    """Accept until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    accepting = loop.create_task(accept(listener, handle, log))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, accepting.cancel)
    with suppress(asyncio.CancelledError):
        await accepting
    log("stopped")


def run(role: str, main: Callable[[Log], Coroutine[Any, Any, None]]) -> int:
    """Run a program; returns the exit code."""
    allow_open_files(OPEN_FILES)
    log = Log(role)
    try:
        asyncio.run(main(log))
    except FederationError as error:
        log("error", reason=str(error))
        return 2
    return 0
