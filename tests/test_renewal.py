"""Certificates that are replaced or revoked while servers and clients run."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2

from fl_privacy.errors import LaunchError
from fl_privacy.files import write_public
from fl_privacy.identity.keyring import Identity, Keyring, certificate_of, peer
from fl_privacy.identity.pki import Authority
from fl_privacy.wire import federation_pb2 as pb, rpc
from helpers import CALL, HOSTS, Keys, eventually, refused

SHUFFLER = Identity("test", "shuffler", "shuffler")
SITE = Identity("test", "site", "site-0")


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

    submit = seed = open
    collect, settle, post, pickup = fetch, finish, finish, finish

    def refused(self, error: Exception) -> None:
        self.refusals.append(str(error))


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
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self.loop).result(CALL)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL)
        self.loop.close()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "pki")


@pytest.fixture
def server(keys: Keys) -> Iterator[Server]:
    made = Server(keys.of("shuffler", "shuffler"))
    yield made
    made.servicer.go.set()
    made.stop()


@pytest.fixture
def dial(server: Server) -> Iterator[Callable[[Keyring], Any]]:
    """Makes stubs with given keys; their channels are closed at the end."""
    channels = []

    def make(keys: Keyring) -> Any:
        channels.append(rpc.channel(server.address, keys))
        return rpc.middleware(channels[-1])

    yield make
    for channel in channels:
        channel.close()


def serial(keys: Keyring) -> int:
    return x509.load_pem_x509_certificate(keys.certificate_file.read_bytes()).serial_number


def finish(stub: Any) -> str:
    try:
        stub.finish(pb.FinishRequest(run="r"), timeout=CALL)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def served(server: Server, keys: Keyring) -> int:
    """The serial number of the certificate that a new connection receives."""
    context = ssl.create_default_context(cafile=str(keys.authority_file))
    context.load_cert_chain(keys.certificate_file, keys.key_file)
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", server.port), CALL)
    with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
        return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"").serial_number


def replace(keys: Keyring, fresh: Keyring) -> None:
    for name in ("key.pem", "cert.pem"):
        write_public(keys.folder / name, (fresh.folder / name).read_bytes())


def test_a_server_starts_using_its_new_certificate(
    keys: Keys, server: Server, dial: Callable[[Keyring], Any], tmp_path: Path
) -> None:
    """Half of a pair changes nothing, nor does a foreign pair; the open connection keeps working throughout."""
    own, site = keys.of("shuffler", "shuffler"), keys.of("site", "site-0")
    stub = dial(site)
    first = serial(own)
    assert finish(stub) == "OK"
    assert served(server, site) == first
    fresh = keys.authority.issue(SHUFFLER, tmp_path / "fresh", HOSTS)
    key = own.key_file.read_bytes()
    own.certificate_file.write_bytes(fresh.certificate_file.read_bytes()[:100])
    assert served(server, site) == first
    write_public(own.certificate_file, fresh.certificate_file.read_bytes())
    assert served(server, site) == first
    write_public(own.key_file, fresh.key_file.read_bytes())
    assert served(server, site) == serial(fresh) != first
    replace(own, Keys(tmp_path / "foreign").of("shuffler", "shuffler"))
    assert served(server, site) == serial(fresh)
    own.key_file.unlink()
    assert served(server, site) == serial(fresh)
    write_public(own.key_file, key)
    assert served(server, site) == serial(fresh)
    assert finish(stub) == "OK"


def test_a_client_continues_with_its_new_certificate(
    keys: Keys, server: Server, dial: Callable[[Keyring], Any], tmp_path: Path
) -> None:
    """With the same stub, an older stream ends on its old connection, which is closed only then."""
    own = keys.of("site", "site-0")
    stub, first = dial(own), serial(own)
    under_way = stub.fetch(pb.FetchRequest(run="r"), timeout=CALL)
    assert next(under_way).round.run == "begun"
    fresh = keys.authority.issue(SITE, tmp_path / "fresh")
    write_public(own.key_file, fresh.key_file.read_bytes())
    assert finish(stub) == "OK"
    write_public(own.certificate_file, fresh.certificate_file.read_bytes())
    assert finish(stub) == "OK"
    future = stub.submit.future(iter([]), timeout=CALL)
    assert future.result(CALL) == pb.SubmitReply()
    assert server.servicer.serials == [first, first, serial(fresh)]
    server.servicer.go.set()
    assert [part.round.run for part in under_way] == ["done"]


def test_a_retired_connection_is_closed_after_its_last_call(keys: Keys, server: Server, tmp_path: Path) -> None:
    own = keys.of("site", "site-0")
    channel = rpc.channel(server.address, own)
    stub: Any = rpc.middleware(channel)
    under_way = stub.fetch(pb.FetchRequest(run="r"), timeout=CALL)
    next(under_way)
    replace(own, keys.authority.issue(SITE, tmp_path / "fresh"))
    assert finish(stub) == "OK"
    assert len(channel._retired) == 1
    server.servicer.go.set()
    list(under_way)
    eventually(lambda: finish(stub) == "OK" and not channel._retired)
    other = stub.fetch(pb.FetchRequest(run="r"), timeout=CALL)
    channel.close()
    with pytest.raises(grpc.RpcError, match="CANCELLED"):
        list(other)


def test_no_call_is_lost_while_certificates_change(keys: Keys, server: Server, tmp_path: Path) -> None:
    """Server and client renew ten times while four threads make calls on one channel."""
    own, site = keys.of("shuffler", "shuffler"), keys.of("site", "site-0")
    channel = rpc.channel(server.address, site)
    stub: Any = rpc.middleware(channel)
    over = threading.Event()

    def call() -> set[str]:
        found = {finish(stub)}
        while not over.is_set():
            found.add(finish(stub))
        return found

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(call) for _ in range(4)]
        for number in range(10):
            replace(own, keys.authority.issue(SHUFFLER, tmp_path / f"server-{number}", HOSTS))
            replace(site, keys.authority.issue(SITE, tmp_path / f"site-{number}"))
            newest = serial(site)
            eventually(lambda: newest in server.servicer.serials)  # noqa: B023 (called at once)
        over.set()
        assert [result.result() for result in results] == [{"OK"}] * 4
    eventually(lambda: finish(stub) == "OK" and not channel._retired)
    channel.close()


def test_a_foreign_and_an_expired_certificate_are_refused(
    keys: Keys, server: Server, dial: Callable[[Keyring], Any], tmp_path: Path
) -> None:
    foreign = Keys(tmp_path / "foreign").of("site", "site-0")
    foreign.authority_file.write_bytes(keys.authority.pem)
    assert finish(dial(foreign)) == "UNAVAILABLE"
    assert finish(dial(keys.expired("site", "site-0"))) == "UNAVAILABLE"
    assert server.servicer.serials == []


def test_a_certificate_that_expired_after_the_handshake_is_refused(keys: Keys) -> None:
    expired = x509.load_pem_x509_certificate(keys.expired("site", "site-0").certificate_file.read_bytes())
    with refused("PERMISSION_DENIED"):
        keys.of("shuffler", "shuffler").refuse_revoked(expired)


def check_health(address: str, keys: Keyring) -> str:
    channel = rpc.channel(address, keys)
    ask, answer = health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
    try:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", ask, answer)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", ask, answer)
        request = health_pb2.HealthCheckRequest()
        assert check(request, timeout=CALL) == next(watch(request, timeout=CALL))
    except grpc.RpcError as error:
        return str(error.code().name)
    finally:
        channel.close()
    return "OK"


def test_a_revoked_caller_is_refused_on_its_open_channel(
    keys: Keys, server: Server, dial: Callable[[Keyring], Any], tmp_path: Path
) -> None:
    own, site, other = keys.of("shuffler", "shuffler"), keys.of("site", "site-0"), keys.of("site", "site-1")
    stub, good = dial(site), dial(other)
    assert (finish(stub), finish(good), check_health(server.address, site)) == ("OK", "OK", "OK")
    assert len(keys.authority.revoke(SITE.uri)) == 1
    write_public(own.revoked_file, keys.authority.revoked_file.read_bytes())
    assert (finish(stub), finish(good)) == ("PERMISSION_DENIED", "OK")
    for call, request in ((stub.fetch, pb.FetchRequest()), (stub.collect, pb.CollectRequest())):
        with pytest.raises(grpc.RpcError, match="revoked"):
            next(call(request, timeout=CALL))
    with pytest.raises(grpc.RpcError, match="revoked"):
        stub.submit(iter([]), timeout=CALL)
    assert check_health(server.address, site) == "PERMISSION_DENIED"
    assert set(server.servicer.refusals) == {f"certificate of {SITE.uri}: revoked"}
    replace(site, keys.authority.issue(SITE, tmp_path / "again"))
    assert finish(stub) == "OK"


def test_unverifiable_revocations_let_nobody_in(
    keys: Keys, server: Server, dial: Callable[[Keyring], Any], tmp_path: Path
) -> None:
    own, stub = keys.of("shuffler", "shuffler"), dial(keys.of("site", "site-1"))
    foreign = Authority.create(tmp_path / "foreign")
    foreign.revoke("nobody")
    keys.authority.revoke("nobody")
    real = keys.authority.revoked_file.read_bytes()
    assert finish(stub) == "OK"
    for wrong in (foreign.revoked_file.read_bytes(), b"", b"\xff", real[:-60], keys.authority.pem):
        write_public(own.revoked_file, wrong)
        assert finish(stub) == "PERMISSION_DENIED"
    own.revoked_file.unlink()
    own.revoked_file.mkdir()
    assert finish(stub) == "PERMISSION_DENIED"
    own.revoked_file.rmdir()
    own.revoked_file.symlink_to(tmp_path / "nowhere")
    assert finish(stub) == "PERMISSION_DENIED"
    write_public(own.revoked_file, real)
    assert finish(stub) == "OK"
    assert len(server.servicer.refusals) == 7
    assert all("install revoked.pem again" in reason for reason in server.servicer.refusals)


def test_a_server_does_not_start_with_mismatched_files(keys: Keys) -> None:
    own = keys.of("shuffler", "shuffler")
    own.key_file.write_bytes(keys.of("site", "site-0").key_file.read_bytes())
    with pytest.raises(LaunchError, match="belong together"):
        rpc.server_credentials(own)
