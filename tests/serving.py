"""For tests: a real server that only counts its callers, and certificates that are replaced under it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from fl_privacy import files
from fl_privacy.identity.keyring import Keyring, certificate_of, peer
from fl_privacy.wire import federation_pb2 as pb, rpc
from gates import Proxy
from helpers import CALL


class Counting:
    """A middleware that records every caller's serial number; a fetch waits until `go` is set."""

    def __init__(self) -> None:
        self.serials: list[int] = []
        self.refusals: list[str] = []
        self.go = threading.Event()

    async def finish(self, request: pb.FinishRequest, context: Any) -> pb.Empty:
        peer(context, "test", "site")
        self.serials.append(certificate_of(context).serial_number)
        return pb.Empty()

    async def fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        self.serials.append(certificate_of(context).serial_number)
        yield pb.Chunk(round=pb.RoundHeader(run="begun"))
        while not self.go.is_set():
            await asyncio.sleep(0.01)
        yield pb.Chunk(round=pb.RoundHeader(run="done"))

    async def open(self, parts: Any, context: Any) -> pb.Empty:
        async for _ in parts:
            pass
        return pb.Empty()

    submit = seed = share = relay = open
    collect = fetch
    settle = abstain = shard = post = pickup = report = check = finish

    def refused(self, error: Exception) -> None:
        self.refusals.append(str(error))


class Noted:
    """A middleware as the server calls it; says what was called."""

    def __init__(self, stub: Any, calls: list[str]) -> None:
        self._stub, self._calls = stub, calls

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self._calls.append(name)
            return getattr(self._stub, name)(*given, **named)

        return call


class Server:
    """A real server with its own thread and event loop."""

    def __init__(self, keys: Keyring) -> None:
        self.servicer = Counting()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        serving = rpc.serve("fl_privacy.wire.Middleware", self.servicer, "127.0.0.1:0", keys, self.servicer.refused)
        self._server, self.port = asyncio.run_coroutine_threadsafe(serving, self.loop).result(CALL)
        self.address = f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self.loop).result(CALL)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL)
        self.loop.close()


class Switch:
    """Forwards connections, each to the address that is its turn; the last address takes all that follow."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = list(addresses)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            host, _, port = self._addresses[0].rpartition(":")
            self._addresses = self._addresses[1:] or self._addresses
            far = socket.create_connection((host, int(port)))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=Proxy._copy, args=pair, daemon=True).start()

    def to(self, address: str) -> None:
        self._addresses = [address]

    def close(self) -> None:
        self._listener.close()


def serial(keys: Keyring) -> int:
    return x509.load_pem_x509_certificate(keys.certificate_file.read_bytes()).serial_number


def finish(stub: Any) -> str:
    try:
        stub.finish(pb.FinishRequest(run="r"), timeout=CALL)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def put(path: Path, data: bytes) -> None:
    """Put a key in place as a whole, for its owner alone."""
    files.replace(path, data, mode=0o600, durable=False, unique=True)


def replace(keys: Keyring, fresh: Keyring) -> None:
    for name in ("key.pem", "cert.pem"):
        put(keys.folder / name, (fresh.folder / name).read_bytes())
