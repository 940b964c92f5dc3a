"""A client's channel that outlives its certificate: it reconnects when the files were replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from fl_privacy.identity.keyring import Keyring, Renewing


@dataclass
class _Line:
    """One gRPC channel and the number of calls running on it."""

    grpc: Any
    calls: int = 0


class Channel:
    """Mutual TLS to one address. New calls use the newest certificate; running calls keep their connection."""

    def __init__(self, address: str, keys: Keyring, options: Sequence[tuple[str, int]]) -> None:
        self._address, self._options = address, list(options)
        self._files = Renewing(keys)
        self._lock = threading.Lock()
        self._line = self._dial()
        self._retired: list[_Line] = []

    def unary_unary(self, method: str, encode: Any = None, decode: Any = None) -> Method:
        return Method(self, lambda channel: channel.unary_unary(method, encode, decode), streams=False)

    def stream_unary(self, method: str, encode: Any = None, decode: Any = None) -> Method:
        return Method(self, lambda channel: channel.stream_unary(method, encode, decode), streams=False)

    def unary_stream(self, method: str, encode: Any = None, decode: Any = None) -> Method:
        return Method(self, lambda channel: channel.unary_stream(method, encode, decode), streams=True)

    def take(self) -> _Line:
        """The line for a new call. Retired lines are closed once no call runs on them."""
        with self._lock:
            if self._files.changed():
                self._retired.append(self._line)
                self._line = self._dial()
            idle = [line for line in self._retired if not line.calls]
            self._retired = [line for line in self._retired if line.calls]
            self._line.calls += 1
            taken = self._line
        for line in idle:
            line.grpc.close()
        return taken

    def give_back(self, line: _Line) -> None:
        with self._lock:
            line.calls -= 1

    def close(self) -> None:
        with self._lock:
            lines = [self._line, *self._retired]
        # Outside the lock: calls that this cancels give their line back.
        for line in lines:
            line.grpc.close()

    def _dial(self) -> _Line:
        key, certificate, authority = self._files.contents
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return _Line(grpc.secure_channel(self._address, credentials, options=self._options))


class Method:
    """One method of a service, as gRPC's own callables: `method(request, timeout=...)`, `method.future(...)`."""

    def __init__(self, channel: Channel, make: Callable[[Any], Any], streams: bool) -> None:
        self._channel, self._make, self._streams = channel, make, streams

    def __call__(self, request: Any, **options: Any) -> Any:
        if self._streams:
            return self._running(lambda call: call(request, **options))
        line = self._channel.take()
        try:
            return self._make(line.grpc)(request, **options)
        finally:
            self._channel.give_back(line)

    def future(self, request: Any, **options: Any) -> Any:
        return self._running(lambda call: call.future(request, **options))

    def _running(self, start: Callable[[Any], Any]) -> Any:
        """A call that is still running when this returns; its line is given back when it ends."""
        line = self._channel.take()
        try:
            call = start(self._make(line.grpc))
        except BaseException:
            self._channel.give_back(line)
            raise
        if not call.add_callback(lambda: self._channel.give_back(line)):
            self._channel.give_back(line)
        return call
