"""Certificates that are replaced or revoked while servers and clients run."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2

from fl_privacy.errors import LaunchError
from fl_privacy.files import write_public
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.pki import Authority
from fl_privacy.wire import federation_pb2 as pb, rpc
from helpers import CALL, HOSTS, Keys, Stranger, eventually, refused
from serving import Server, finish, put, replace, serial

SHUFFLER = Identity("test", "shuffler", "shuffler")
SITE = Identity("test", "site", "site-0")


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
        channels.append(rpc.channel(server.address, keys, SHUFFLER))
        return rpc.middleware(channels[-1])

    yield make
    for channel in channels:
        channel.close()


def served(server: Server, keys: Keyring) -> int:
    """The serial number of the certificate that a new connection receives."""
    context = ssl.create_default_context(cafile=str(keys.authority_file))
    context.load_cert_chain(keys.certificate_file, keys.key_file)
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", server.port), CALL)
    with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
        return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"").serial_number


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
    put(own.key_file, fresh.key_file.read_bytes())
    assert served(server, site) == serial(fresh) != first
    replace(own, Keys(tmp_path / "foreign").of("shuffler", "shuffler"))
    assert served(server, site) == serial(fresh)
    own.key_file.unlink()
    assert served(server, site) == serial(fresh)
    put(own.key_file, key)
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
    put(own.key_file, fresh.key_file.read_bytes())
    assert finish(stub) == "OK"
    keys.enlist(fresh)
    write_public(own.certificate_file, fresh.certificate_file.read_bytes())
    assert finish(stub) == "OK"
    future = stub.submit.future(iter([]), timeout=CALL)
    assert future.result(CALL) == pb.SubmitReply()
    assert server.servicer.serials == [first, first, serial(fresh)]
    server.servicer.go.set()
    assert [part.round.run for part in under_way] == ["done"]


def test_a_retired_connection_is_closed_after_its_last_call(keys: Keys, server: Server, tmp_path: Path) -> None:
    own = keys.of("site", "site-0")
    channel = rpc.channel(server.address, own, SHUFFLER)
    stub: Any = rpc.middleware(channel)
    under_way = stub.fetch(pb.FetchRequest(run="r"), timeout=CALL)
    next(under_way)
    replace(own, keys.renewed(own))
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
    channel = rpc.channel(server.address, site, SHUFFLER)
    stub: Any = rpc.middleware(channel)
    over = threading.Event()

    def call() -> set[str]:
        found = {finish(stub)}
        while not over.is_set():
            found.add(finish(stub))
        return found

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(call) for _ in range(4)]
        for _ in range(10):
            replace(own, keys.renewed(own))
            replace(site, keys.renewed(site))
            newest = serial(site)
            eventually(lambda: newest in server.servicer.serials)  # noqa: B023 (called at once)
        over.set()
        assert [result.result() for result in results] == [{"OK"}] * 4
    eventually(lambda: finish(stub) == "OK" and not channel._retired)
    channel.close()


def test_a_foreign_and_an_expired_certificate_are_refused(keys: Keys, server: Server, tmp_path: Path) -> None:
    authority = keys.of("site", "site-0").authority_file
    for own in (Keys(tmp_path / "foreign").of("site", "site-0"), keys.expired("site", "site-0")):
        stranger = Stranger(server.address, authority, own)
        assert finish(stranger.stub) == "UNAVAILABLE"
        stranger.close()
    assert server.servicer.serials == []


def test_a_certificate_that_expired_after_the_handshake_is_refused(keys: Keys) -> None:
    expired = x509.load_pem_x509_certificate(keys.expired("site", "site-0").certificate_file.read_bytes())
    with refused("PERMISSION_DENIED"):
        keys.of("shuffler", "shuffler").refuse_revoked(expired)


def check_health(address: str, keys: Keyring) -> str:
    channel = rpc.channel(address, keys, SHUFFLER)
    ask, answer = health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
    try:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", ask, answer)
        assert check(health_pb2.HealthCheckRequest(), timeout=CALL).status == health_pb2.HealthCheckResponse.SERVING
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
    replace(site, keys.enlist(keys.authority.issue(SITE, tmp_path / "again")))
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
