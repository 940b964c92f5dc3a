"""The socket between the thin ClientApp and the worker: one framed request, one framed reply.

A frame is a JSON object and optional raw bytes. This module is all that a ClientApp needs, so it imports nothing heavy.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

HEAD = struct.Struct("!IQ")
MAX_JSON = 64 * 1024
MAX_BYTES = 4 * 2**31
PATIENCE = 10.0  # seconds a peer may take to send a frame, besides what its bytes take at the slowest rate
SLOWEST = 16 * 2**20  # bytes per second
RESTART = 60.0  # seconds for a worker that is starting, or was restarted
ASKED = 3  # how often a ticket is sent to a worker that dies with it
POLL = 0.1

Frame = tuple[dict[str, Any], bytearray]


class PipeError(Exception):
    """The other end sent an invalid frame or disconnected."""


def send(connection: socket.socket, fields: dict[str, Any], payload: bytes | memoryview = b"") -> None:
    text = json.dumps(fields).encode()
    connection.sendall(HEAD.pack(len(text), len(payload)) + text)
    if payload:
        connection.sendall(payload)


def receive(connection: socket.socket, most: int = MAX_BYTES) -> Frame:
    """One frame of at most `most` payload bytes, in time; anything else is an error.

    In time is within the socket's timeout, and as long as the announced payload takes at the slowest rate.
    """
    patience = connection.gettimeout()
    until = None if patience is None else time.monotonic() + patience
    try:
        return _frame(connection, most, until)
    finally:
        connection.settimeout(patience)


def _frame(connection: socket.socket, most: int, until: float | None) -> Frame:
    text_size, size = HEAD.unpack(_exactly(connection, HEAD.size, until))
    if text_size > MAX_JSON or size > most:
        raise PipeError(f"frame of {text_size} + {size} bytes is too large")
    try:
        fields = json.loads(bytes(_exactly(connection, text_size, until)))
    except (ValueError, RecursionError):
        raise PipeError("frame is not JSON") from None
    if not isinstance(fields, dict):
        raise PipeError("frame is not an object")
    return fields, _exactly(connection, size, None if until is None else until + size / SLOWEST)


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if until is not None:
            connection.settimeout(max(1e-3, until - time.monotonic()))
        count = connection.recv_into(view)
        if count == 0:
            raise PipeError("closed in the middle of a frame")
        view = view[count:]
    return data


def ask(path: str, fields: dict[str, Any], payload: bytes | memoryview, timeout: float) -> Frame:
    """Send the worker a ticket and wait for its receipt; a worker that was restarted meanwhile is asked again."""
    for _ in range(ASKED - 1):
        try:
            return _ask(path, fields, payload, timeout)
        except (ConnectionError, PipeError):
            time.sleep(POLL)
    return _ask(path, fields, payload, timeout)


def _ask(path: str, fields: dict[str, Any], payload: bytes | memoryview, timeout: float) -> Frame:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        _connect(connection, path, time.monotonic() + RESTART)
        send(connection, fields, payload)
        return receive(connection)


def _connect(connection: socket.socket, path: str, until: float) -> None:
    while True:
        try:
            return connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):  # the last: too many at once
            if time.monotonic() > until:
                raise
            time.sleep(POLL)
