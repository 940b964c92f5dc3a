"""The tickets that reach a worker: every connection is read in its own thread, complete tickets are answered in turn.

One that sends nothing, or too slowly, or does not read its reply, therefore delays nobody.
"""

from __future__ import annotations

import errno
import queue
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fl_privacy.ops.log import Log

from . import pipe

READING = 64  # connections at a time; a newer one takes the place of the oldest
WAITING = 8  # complete tickets at a time
SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)

Reply = tuple[dict[str, Any], bytes | memoryview]
ABSTAIN = "abstain"
BUSY: Reply = ({"status": ABSTAIN}, b"")


@dataclass
class Asked:
    """A complete ticket, its model if it has one, and whoever waits for the reply."""

    connection: socket.socket
    fields: dict[str, Any]
    payload: bytearray
    _reply: queue.SimpleQueue[Reply] = field(default_factory=queue.SimpleQueue)

    def answer(self, reply: Reply) -> None:
        self._reply.put(reply)

    def wait(self) -> Reply:
        return self._reply.get()

    @property
    def is_wanted(self) -> bool:
        """Whether the ClientApp still waits: the server invites a site again whose ClientApp is gone."""
        hung_up = select.poll()
        hung_up.register(self.connection, 0)
        return not hung_up.poll(0)


class Desk:
    """Accepts connections in a thread of its own, until the listener is closed."""

    def __init__(self, listener: socket.socket, most: int, log: Log) -> None:
        """`most` bytes may come with a ticket."""
        self._listener, self._most, self._log = listener, most, log
        self._reading: dict[socket.socket, None] = {}  # in the order of arrival
        self._guard = threading.Lock()
        self._waiting: queue.Queue[Asked | OSError] = queue.Queue(WAITING)
        threading.Thread(target=self._accept, name="tickets", daemon=True).start()

    def next(self) -> Asked:
        """The next complete ticket that somebody still waits for; OSError when the listener is closed."""
        while True:
            found = self._waiting.get()
            if isinstance(found, OSError):
                raise found
            if found.is_wanted:
                return found
            found.answer(BUSY)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in SHORTAGE:
                    time.sleep(pipe.POLL)
                    continue
                self._waiting.put(error)
                return
            self._make_room()
            with self._guard:
                self._reading[connection] = None
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _make_room(self) -> None:
        """Hang up on the oldest of too many; its thread sees the end, and closes it."""
        with self._guard:
            if len(self._reading) < READING:
                return
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _attend(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(pipe.PATIENCE)
            try:
                pipe.send(connection, *self._reply(connection))
            except (OSError, pipe.PipeError) as error:
                self._log.rate_limited("pipe", reason=str(error))

    def _reply(self, connection: socket.socket) -> Reply:
        try:
            asked = Asked(connection, *pipe.receive(connection, self._most))
        finally:
            with self._guard:
                self._reading.pop(connection, None)
        try:
            self._waiting.put_nowait(asked)
        except queue.Full:
            self._log.rate_limited("pipe", reason=f"{WAITING} tickets are already waiting")
            return BUSY
        return asked.wait()
