"""Whoever dials checks whom: every trick with a certificate of the right authority is refused, on real TLS servers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_privacy.dialling import usual_proxy
from fl_privacy.files import write_public
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.wire import federation_pb2 as pb, rpc
from helpers import CALL, HOSTS, Keys
from serving import Server, Switch, finish, replace, serial

SHUFFLER = Identity("test", "shuffler", "shuffler")

Serve = Callable[[Keyring], Server]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "pki")
    made.of("shuffler", "shuffler")
    return made


@pytest.fixture
def site(keys: Keys) -> Keyring:
    return keys.of("site", "site-0")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, and stops them at the end."""
    made: list[Server] = []

    def start(keys: Keyring) -> Server:
        made.append(Server(keys))
        return made[-1]

    yield start
    for server in made:
        server.stop()


@pytest.fixture
def dial(site: Keyring) -> Iterator[Callable[[str], Any]]:
    """Makes stubs of a site that means to call the shuffler; their channels are closed at the end."""
    channels = []

    def make(address: str) -> Any:
        channels.append(rpc.channel(address, site, SHUFFLER))
        return rpc.middleware(channels[-1])

    yield make
    for channel in channels:
        channel.close()


def other_role(keys: Keys, folder: Path) -> Keyring:
    return keys.of("aggregator", "aggregator-0")


def other_name(keys: Keys, folder: Path) -> Keyring:
    return keys.of("shuffler", "another")


def other_federation(keys: Keys, folder: Path) -> Keyring:
    return keys.equip(keys.authority.issue(Identity("else", "shuffler", "shuffler"), folder, HOSTS))


def unlisted(keys: Keys, folder: Path) -> Keyring:
    return keys.equip(keys.authority.issue(SHUFFLER, folder, HOSTS))


def revoked(keys: Keys, folder: Path) -> Keyring:
    keys.authority.revoke(SHUFFLER.uri)
    shutil.copy(keys.authority.revoked_file, keys.of("site", "site-0").revoked_file)
    return keys.of("shuffler", "shuffler")


TRICKS = {
    "another party than": other_role,
    "fl-privacy://test/shuffler/another: another party than": other_name,
    "fl-privacy://else/shuffler/shuffler: another party than": other_federation,
    "has another key than the roster's": unlisted,
    ": revoked": revoked,
}


@pytest.mark.parametrize("reason", TRICKS)
def test_another_certificate_of_the_authority_for_the_host_is_refused(
    keys: Keys, dial: Callable[[str], Any], serve: Serve, tmp_path: Path, reason: str
) -> None:
    server = serve(TRICKS[reason](keys, tmp_path / "trick"))
    with pytest.raises(grpc.RpcError, match=reason) as caught:
        dial(server.address).finish(pb.FinishRequest(run="r"), timeout=CALL)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert server.servicer.serials == server.servicer.refusals == []


def test_an_expired_certificate_is_refused_until_it_is_renewed(
    keys: Keys, dial: Callable[[str], Any], serve: Serve, tmp_path: Path
) -> None:
    own, fresh = keys.of("shuffler", "shuffler"), keys.renewed(keys.of("shuffler", "shuffler"))
    expired = keys.expired("shuffler", "shuffler")
    replace(own, expired)
    keys.enlist(own)
    server = serve(own)
    stub = dial(server.address)
    with pytest.raises(grpc.RpcError, match="expired") as caught:
        stub.finish(pb.FinishRequest(run="r"), timeout=CALL)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    replace(own, fresh)
    keys.enlist(own)
    assert finish(stub) == "OK"


@pytest.mark.parametrize("trick", [other_role, unlisted], ids=["another role", "another key"])
def test_who_answered_first_must_also_be_who_answers_the_calls(
    keys: Keys, dial: Callable[[str], Any], serve: Serve, tmp_path: Path, trick: Callable[[Keys, Path], Keyring]
) -> None:
    """gRPC trusts the certificate that was checked, and no other of the same authority for the same host."""
    genuine, impostor = serve(keys.of("shuffler", "shuffler")), serve(trick(keys, tmp_path / "trick"))
    switch = Switch(genuine.address, impostor.address)
    stub = dial(switch.address)
    assert finish(stub) == "PERMISSION_DENIED"
    assert switch.connections > 2
    assert genuine.servicer.serials == impostor.servicer.serials == impostor.servicer.refusals == []
    switch.close()


def test_a_connection_takes_one_handshake_more_and_a_call_none(
    keys: Keys, dial: Callable[[str], Any], serve: Serve
) -> None:
    switch = Switch(serve(keys.of("shuffler", "shuffler")).address)
    stub = dial(switch.address)
    assert [finish(stub) for _ in range(5)] == ["OK"] * 5
    assert switch.connections == 2
    switch.close()


def test_a_server_that_returns_with_a_renewed_certificate_is_called_again(
    keys: Keys, dial: Callable[[str], Any], serve: Serve
) -> None:
    """The old certificate is no longer shown; the key is the same."""
    own = keys.of("shuffler", "shuffler")
    before, fresh = serve(own), keys.renewed(own)
    after = serve(fresh)
    switch = Switch(before.address, before.address, after.address)
    stub = dial(switch.address)
    assert finish(stub) == "OK"
    before.stop()
    assert serial(fresh) != serial(own)
    assert (finish(stub), finish(stub)) == ("UNAVAILABLE", "OK")
    assert len(after.servicer.serials) == 1
    switch.close()


def test_a_party_that_is_revoked_or_gets_another_key_is_not_called_again_on_an_open_channel(
    keys: Keys, site: Keyring, dial: Callable[[str], Any], serve: Serve, tmp_path: Path
) -> None:
    server = serve(keys.of("shuffler", "shuffler"))
    stub, real = dial(server.address), keys.roster_file.read_bytes()
    assert finish(stub) == "OK"
    keys.enlist(unlisted(keys, tmp_path / "next"))
    assert finish(stub) == "PERMISSION_DENIED"
    write_public(keys.roster_file, real)
    assert finish(stub) == "OK"
    revoked(keys, tmp_path)
    assert finish(stub) == "PERMISSION_DENIED"
    assert len(server.servicer.serials) == 2


def test_streams_and_futures_are_not_begun_either(
    keys: Keys, dial: Callable[[str], Any], serve: Serve, tmp_path: Path
) -> None:
    server = serve(other_role(keys, tmp_path))
    stub = dial(server.address)
    for begin in (stub.fetch, stub.submit, stub.submit.future):
        with pytest.raises(grpc.RpcError, match="another party than"):
            begin(pb.FetchRequest() if begin == stub.fetch else iter([]), timeout=CALL)


def test_the_proxy_is_that_of_grpc() -> None:
    given = {"https_proxy": "http://a:1", "http_proxy": "http://b:2", "no_proxy": "localhost, .inside"}
    assert usual_proxy("far.example", given) == "http://a:1"
    assert usual_proxy("far.example", {**given, "grpc_proxy": "http://c:3"}) == "http://c:3"
    assert usual_proxy("mix.inside", given) is None
    assert usual_proxy("localhost", given) is None
    assert usual_proxy("mix.inside", {**given, "no_grpc_proxy": "other"}) == "http://a:1"
    assert usual_proxy("far.example", {}) is None
