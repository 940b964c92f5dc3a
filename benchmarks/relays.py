"""Relays between the parties of a run on this machine: they count the bytes of every link, and can cut one.

A party dials a relay of its own for every middleware, in place of the middleware; TLS passes through unopened.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.place import Place

T = TypeVar("T")
PIECE = 1 << 18
HOST = "127.0.0.1"


@dataclass
class Link:
    """From one party to one middleware: bytes as TCP carries them, without its headers."""

    target: str
    sent: int = 0
    received: int = 0
    connections: int = 0
    handshakes: int = 0  # bytes both ways until the dialling side has answered the other's first flight
    most: float = math.inf  # bytes from the dialling side; with the next one, the link is cut for good

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.sent <= self.most:
                host, _, port = self.target.rpartition(":")
                there = await asyncio.open_connection(host, int(port))
                self.connections += 1
                try:
                    flights = [0]  # of the dialling side
                    ways = (reader, there[1], "sent", flights), (there[0], writer, "received", flights)
                    await asyncio.gather(*(self._pump(*way) for way in ways))
                finally:
                    there[1].close()
        except OSError:
            pass  # the end of a connection, or a link that was cut
        finally:
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str, flights: list[int]
    ) -> None:
        while data := await reader.read(PIECE):
            flights[0] += way == "sent"
            if flights[0] < 2 or (way == "sent" and flights[0] == 2):
                self.handshakes += len(data)
            else:
                setattr(self, way, getattr(self, way) + len(data))
            if self.sent > self.most:
                raise ConnectionAbortedError("the link is cut")
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


class Relays:
    """All links of a run, by dialling party and address of the middleware."""

    def __init__(self) -> None:
        self.links: dict[tuple[str, str], Link] = {}
        self._addresses: dict[tuple[str, str], str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._lock = threading.Lock()

    def address(self, party: str, target: str) -> str:
        """Where a party dials a middleware: a port that nobody else is given."""
        with self._lock:
            if (party, target) not in self.links:
                self.links[party, target] = link = Link(target)
                server = self._run(asyncio.start_server(link.carry, HOST, 0, limit=PIECE))
                self._addresses[party, target] = f"{HOST}:{server.sockets[0].getsockname()[1]}"
            return self._addresses[party, target]

    def of(self, party: str) -> list[Link]:
        return [link for (one, _), link in self.links.items() if one == party]

    def to(self, target: str) -> list[Link]:
        return [link for (_, one), link in self.links.items() if one == target]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)


@contextmanager
def relayed(nodes: bool = False) -> Iterator[Relays]:
    """Runs of the local engine that start inside dial their middleware through relays; `nodes`: the SuperLink too."""
    relays, place = Relays(), Workspace.place

    def through(self: Workspace, role: str, name: str) -> Place:
        found: Place = place(self, role, name)
        if nodes and found.superlink is not None and found.role.has_node:
            found = replace(found, superlink=relays.address(name, found.superlink))
        return replace(found, middleware=tuple(relays.address(name, target) for target in found.middleware))

    relays.start()
    Workspace.place = through  # type: ignore[method-assign]
    try:
        yield relays
    finally:
        Workspace.place = place  # type: ignore[method-assign]
        relays.stop()
