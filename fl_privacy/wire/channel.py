"""A client's channel to one party. It outlives certificates: it reconnects when its own or the party's was replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fl_privacy.errors import ProtocolError
from fl_privacy.identity.keyring import Identity, Keyring, Renewing
from fl_privacy.wire.peer import Peer

CONNECT = 10.0  # seconds
FIRST_TRY = 0.5  # seconds; twice as long every time


class Refused(grpc.RpcError):  # type: ignore[misc]
    """A call that was not made: the party cannot be reached, or it is not the one that we mean."""

    def __init__(self, error: ProtocolError) -> None:
        super().__init__(str(error))
        self._code, self._details = getattr(grpc.StatusCode, error.code), str(error)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@dataclass
class _Line:
    """One gRPC channel, the certificates at its two ends, and the number of calls running on it."""

    grpc: Any
    files: tuple[bytes, bytes, bytes]
    peer: x509.Certificate
    calls: int = 0
    lost: bool = False


class Channel:
    """Mutual TLS to one party. New calls use the newest certificates; running calls keep their connection."""

    def __init__(self, address: str, keys: Keyring, whom: Identity, options: Sequence[tuple[str, int]]) -> None:
        self._address, self._options = address, list(options)
        self._files, self._peer = Renewing(keys), Peer(address, keys, whom)
        self._lock, self._dialling = threading.Lock(), threading.Lock()
        self._line: _Line | None = None
        self._retired: list[_Line] = []

    def unary_unary(self, method: str, encode: Any = None, decode: Any = None) -> Method:
        return Method(self, lambda channel: channel.unary_unary(method, encode, decode), streams=False)

    def stream_unary(self, method: str, encode: Any = None, decode: Any = None) -> Method:
        return Method(self, lambda channel: channel.stream_unary(method, encode, decode), streams=False)

    def unary_stream(self, method: str, encode: Any = None, decode: Any = None) -> Method:
        return Method(self, lambda channel: channel.unary_stream(method, encode, decode), streams=True)

    def take(self, seconds: float | None = None) -> _Line:
        """The line for a new call. Retired lines are closed once no call runs on them."""
        with self._dialling:
            line = self._current(CONNECT if seconds is None else min(seconds, CONNECT))
            with self._lock:
                line.calls += 1
                idle = [old for old in self._retired if not old.calls]
                self._retired = [old for old in self._retired if old.calls]
        for old in idle:
            old.grpc.close()
        return line

    def give_back(self, line: _Line, code: grpc.StatusCode | None = None) -> None:
        """A call ended; if its connection was lost, the next call checks again who answers."""
        with self._lock:
            line.calls -= 1
            line.lost |= code is grpc.StatusCode.UNAVAILABLE

    def close(self) -> None:
        with self._lock:
            lines = [*self._retired, *([] if self._line is None else [self._line])]
        # Outside the lock: calls that this cancels give their line back.
        for line in lines:
            line.grpc.close()

    def _current(self, seconds: float) -> _Line:
        """The open line as long as nothing changed at either end."""
        line, files = self._line, self._files.get()
        if line is not None and line.files == files and not line.lost and self._peer.still(line.peer):
            return line
        made = self._reached(files, time.monotonic() + seconds)
        with self._lock:
            self._retired += [] if line is None else [line]
            self._line = made
        return made

    def _reached(self, files: tuple[bytes, bytes, bytes], until: float) -> _Line:
        """A line to whoever answers, checked again if its certificate was replaced before gRPC connected."""
        patience = FIRST_TRY
        while True:
            try:
                peer = self._peer.certificate(until - time.monotonic())
            except ProtocolError as error:
                raise Refused(error) from None
            channel = self._dial(files, peer)
            patience *= 2
            if _connects(channel, min(patience, until - time.monotonic())) or time.monotonic() >= until:
                return _Line(channel, files, peer)
            channel.close()

    def _dial(self, files: tuple[bytes, bytes, bytes], peer: x509.Certificate) -> Any:
        """The party's own certificate is the only root: no other certificate of the authority passes."""
        key, certificate, _ = files
        credentials = grpc.ssl_channel_credentials(peer.public_bytes(Encoding.PEM), key, certificate)
        return grpc.secure_channel(self._address, credentials, options=self._options)


def _connects(channel: Any, seconds: float) -> bool:
    ready = grpc.channel_ready_future(channel)
    try:
        ready.result(max(0.0, seconds))
    except grpc.FutureTimeoutError:
        ready.cancel()
        return False
    return True


class Method:
    """One method of a service, as gRPC's own callables: `method(request, timeout=...)`, `method.future(...)`."""

    def __init__(self, channel: Channel, make: Callable[[Any], Any], streams: bool) -> None:
        self._channel, self._make, self._streams = channel, make, streams

    def __call__(self, request: Any, **options: Any) -> Any:
        if self._streams:
            return self._running(lambda call: call(request, **options), options)
        line, code = self._channel.take(options.get("timeout")), None
        try:
            return self._make(line.grpc)(request, **options)
        except grpc.RpcError as error:
            code = error.code()
            raise
        finally:
            self._channel.give_back(line, code)

    def future(self, request: Any, **options: Any) -> Any:
        return self._running(lambda call: call.future(request, **options), options)

    def _running(self, start: Callable[[Any], Any], options: Mapping[str, Any]) -> Any:
        """A call that is still running when this returns; its line is given back when it ends."""
        line = self._channel.take(options.get("timeout"))
        try:
            call = start(self._make(line.grpc))
        except BaseException:
            self._channel.give_back(line)
            raise
        if not call.add_callback(lambda: self._channel.give_back(line, call.code())):
            self._channel.give_back(line, call.code())
        return call
