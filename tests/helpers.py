"""For tests: a throwaway PKI, real middleware processes, and a channel for every party."""

from __future__ import annotations

import datetime as dt
import itertools
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from numpy.typing import NDArray

from fl_privacy.coding import FLOAT32
from fl_privacy.config import Federation
from fl_privacy.deploy import environment, forkserver
from fl_privacy.deploy.processes import Fleet
from fl_privacy.errors import ProtocolError
from fl_privacy.identity import pki
from fl_privacy.identity.keyring import Identity, Keyring, holder
from fl_privacy.identity.pki import Authority
from fl_privacy.identity.roster import Member
from fl_privacy.identity.tls import own_identity
from fl_privacy.ops.tail import Tail
from fl_privacy.roles import ROLES
from fl_privacy.round.cohort import Cohort
from fl_privacy.round.terms import FIELDS, Terms, joined
from fl_privacy.routes.ends import Ask
from fl_privacy.wire import client, federation_pb2 as pb, rpc
from fl_privacy.wire.stream import chunks, digest
from server_app.asking import Asking

Array = NDArray[np.float32]
HOSTS = ("127.0.0.1", "localhost")
LAYOUT = "layout-of-the-test"
START = 60.0
CALL = 20.0
DEPLOYED = ("shuffler", "aggregator", "mailbox", "mix", "region")


@dataclass
class Keys:
    """Certificates of one authority, issued on first use, and one roster that all of their parties share."""

    folder: Path
    federation: str = "test"
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _enlisting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.authority = Authority.open(self.folder / "ca")
        self.roster_file = self.folder / f"{self.federation}.roster.json"
        found = self.authority.roster(self.federation, self.roster_file)
        self.members = {} if found is None else {member.party: member for member in found.members}

    def of(self, role: str, name: str) -> Keyring:
        folder = self.folder / role / name
        with self._enlisting:  # sites of one test may be threads, and an older roster must not replace a newer one
            if not (folder / "cert.pem").exists():
                self.enlist(self.authority.issue(Identity(self.federation, role, name), folder, HOSTS))
        return Keyring(folder)

    def enlist(self, keys: Keyring) -> Keyring:
        """From now on, this is the key of its party."""
        identity, key = holder(x509.load_pem_x509_certificate(keys.certificate_file.read_bytes()))
        self.members[identity.role, identity.name] = Member(identity.role, identity.name, key)
        self.authority.enlist(self.federation, self.members.values(), self.roster_file)
        return self.equip(keys)

    def equip(self, keys: Keyring) -> Keyring:
        """Give the shared roster to a party that may not be in it."""
        keys.roster_file.unlink(missing_ok=True)
        keys.roster_file.symlink_to(self.roster_file)
        return keys

    def renewed(self, keys: Keyring, hosts: Sequence[str] = HOSTS) -> Keyring:
        """The next certificate for the same key, in a folder of its own."""
        folder = self.folder / f"renewed-{next(self._numbers)}"
        shutil.copytree(keys.folder, folder, symlinks=True)
        key, identity = pki.load_key(keys.key_file).public_key(), own_identity(keys)
        fresh = self.authority.certify(identity, key, hosts)
        (folder / "cert.pem").write_bytes(fresh.public_bytes(Encoding.PEM))
        return Keyring(folder)

    def expired(self, role: str, name: str) -> Keyring:
        """A certificate that expired yesterday."""
        with mock.patch.object(pki, "LEAF_DAYS", -1), mock.patch.object(pki, "_SKEW", dt.timedelta(days=9)):
            return self.equip(
                self.authority.issue(
                    Identity(self.federation, role, name), self.folder / f"expired-{next(self._numbers)}", HOSTS
                )
            )


class Party:
    """One certificate's calls to one middleware."""

    def __init__(self, address: str, keys: Keyring, whom: Identity) -> None:
        self.channel: Any = rpc.channel(address, keys, whom)
        self.stub: Any = rpc.middleware(self.channel)

    def close(self) -> None:
        self.channel.close()


class Stranger(Party):
    """A caller that does not check whom it calls, with any certificate or none."""

    def __init__(self, address: str, authority: Path, keys: Keyring | None = None) -> None:
        own = () if keys is None else keys.read()[:2]
        credentials = grpc.ssl_channel_credentials(authority.read_bytes(), *own)
        self.channel = grpc.secure_channel(address, credentials, options=rpc.CHANNEL_OPTIONS)
        self.stub = rpc.middleware(self.channel)


@dataclass
class Deployment:
    """A running middleware process with everything its callers need."""

    fleet: Fleet
    name: str
    address: str
    keys: Keys
    federation: Federation
    parties: dict[tuple[str, str], Party] = field(default_factory=dict)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.fleet.children[self.name].process.pid)

    def party(self, role: str, name: str) -> Party:
        if (role, name) not in self.parties:
            party = self.parties[role, name] = Party(self.address, self.keys.of(role, name), self.identity)
            party.stub.deployment = self  # for `open_round`
        return self.parties[role, name]

    @property
    def identity(self) -> Identity:
        return Identity(self.keys.federation, self.name.partition("-")[0], self.name)

    @property
    def server(self) -> Any:
        return self.party("server", "server").stub

    def site(self, index: int) -> Any:
        return self.party("site", self.federation.site_names[index]).stub

    def events(self, event: str) -> list[dict[str, Any]]:
        return [e for e in Tail(self.fleet.children[self.name].log).poll() if e["event"] == event]

    def close_channels(self) -> None:
        for party in self.parties.values():
            party.close()
        self.parties.clear()

    def stop(self) -> None:
        self.close_channels()
        self.fleet.stop(self.name)


def deploy(
    folder: Path,
    keys: Keys,
    federation: Federation,
    role: str,
    index: int = 0,
    options: Sequence[str] = (),
    script: Path | None = None,
) -> Deployment:
    """Start a middleware of this role and wait until it listens; `script` may replace its module."""
    name = f"{role}-{index}" if ROLES[role].numbered else role
    config = folder / "federation.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(federation.to_yaml())
    command = [
        sys.executable,
        *(("-m", ROLES[role].module) if script is None else (str(script),)),
        "--config",
        str(config),
        "--keys",
        str(keys.of(role, name).folder),
    ]
    command += ["--state", str(folder / f"state-{index}")]
    if ROLES[role].numbered:
        command += ["--index", str(index)]
    fleet = Fleet(folder / "logs", folder / f"{name}.pids")
    if sys.platform == "linux":  # as the local engine does
        fleet.forks[False] = forkserver.shared((ROLES[one].module for one in DEPLOYED), environment.own())
    fleet.start(name, [*command, *options])
    address = str(fleet.wait_for(name, "listening", START)["address"])
    return Deployment(fleet, name, address, keys, federation)


def kill(deployment: Deployment) -> None:
    """SIGKILL: no chance to clean up."""
    deployment.close_channels()
    child = deployment.fleet.children.pop(deployment.name)
    child.signal(signal.SIGKILL)
    child.process.wait()


NONCE, SALT = b"n" * 32, b"s" * 32
_numbers = itertools.count(1)


def round_header(run: str, round: int, length: int, /, **changes: Any) -> pb.RoundHeader:
    """A round of three sites with a short deadline; `open_round` adds the rest of its terms."""
    fields = {"cohort": 3, "quorum": 3, "deadline": 20.0, "layout": LAYOUT, "number": next(_numbers)}
    return pb.RoundHeader(run=run, round=round, length=length, **{"parameters": length, **fields, **changes})


def bound(deployment: Deployment, header: pb.RoundHeader, model: Array | None = None) -> pb.RoundHeader:
    return bound_to(deployment.federation, deployment.keys, header, model)


def bound_to(federation: Federation, keys: Keys, header: pb.RoundHeader, model: Array | None = None) -> pb.RoundHeader:
    """Complete a header's terms as an honest server does, where a test has not set them otherwise."""
    names = list(header.sites) or list(federation.site_names[: header.cohort])
    known = [keys.of("site", name) for name in federation.site_names]
    roster = [*known, keys.of("server", "server")][-1].roster()
    del header.sites[:]
    header.sites.extend(names)
    if model is not None:
        header.model, header.parameters = header.model or digest(model), model.size
    facts = {
        "nonce": NONCE,
        "federation": federation.digest,
        "roster": roster.digest,
        "salt": SALT,
        "root": Cohort(names, SALT).root,
        "organisations": len(names),
        "recipient": roster.key_of("server", "server"),
        "model": joined(list(header.shards)),
    }
    for name, value in facts.items():
        if not getattr(header, name):
            setattr(header, name, value)
    if not header.attempt:
        header.attempt = Terms(**{name: getattr(header, name) for name in FIELDS}).name
    return header


def ask_of(federation: Federation, keys: Keys, run: str, round: int, model: bytes, layout: Any, **wanted: int) -> Ask:
    """An attempt with all sites, as the server makes it."""
    for site in federation.site_names:
        keys.of("site", site)
    asking = Asking(federation, layout, keys.of("server", "server"), run, NONCE, keys.folder)
    return asking.make(round, federation.site_names, 1, wanted, model)


def open_round(stub: Any, header: pb.RoundHeader, model: Array | None = None) -> pb.RoundHeader:
    """Open a round; at a shuffler with a model, of zeros if none is given."""
    deployment: Deployment = stub.deployment
    if deployment.name == "shuffler" and model is None:
        model = np.full(header.parameters, header.number, np.float32)  # another one every time
    client.open_round(stub, bound(deployment, header, model), model, CALL)
    return header


def vector_header(round: pb.RoundHeader, update: Array, /, **changes: Any) -> pb.VectorHeader:
    """The header that an honest site sends with its update, except for `changes`."""
    fields = {
        "run": round.run,
        "round": round.round,
        "attempt": round.attempt,
        "layout": round.layout,
        "dtype": "float32",
        "length": update.size,
        "digest": digest(update),
        "floor": 1,
    }
    return pb.VectorHeader(**{**fields, **changes})


def send(stub: Any, header: pb.VectorHeader, update: Array) -> pb.SubmitReply:
    """Submit an update with any header."""
    return stub.submit(chunks(pb.Chunk(vector=header), [update]), timeout=CALL)


def submit(stub: Any, round: pb.RoundHeader, update: Array, **options: Any) -> bool:
    return client.submit(stub, round, update, CALL, FLOAT32, **options)


def collect(stub: Any, round: pb.RoundHeader, timeout: float = CALL) -> client.Release:
    request = pb.CollectRequest(run=round.run, round=round.round, attempt=round.attempt)
    return client.collect(stub.collect(request, timeout=timeout))


class Hanging:
    """A Submit stream that sends parts on demand and otherwise hangs."""

    def __init__(self, stub: Any, *parts: Any) -> None:
        self._parts: list[Any] = list(parts)
        self._ready = threading.Condition()
        self._done = False
        self.call = stub.submit.future(self._stream(), timeout=CALL)

    def _stream(self) -> Iterator[Any]:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._parts or self._done)
                if not self._parts:
                    return
                part = self._parts.pop(0)
            yield part

    def send(self, part: Any) -> None:
        with self._ready:
            self._parts.append(part)
            self._ready.notify()

    def end(self) -> None:
        with self._ready:
            self._done = True
            self._ready.notify()

    def cancel(self) -> None:
        self.call.cancel()
        self.end()


def status(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The name of the gRPC status that a call ends with."""
    try:
        call(*arguments, **options)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@contextmanager
def refused(code: str) -> Iterator[None]:
    """Assert that the block raises a ProtocolError with this code."""
    with pytest.raises(ProtocolError) as caught:
        yield
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"


def columns(matrix: Array) -> Array:
    """The multiset of each column of a matrix: what remains after every column has been shuffled."""
    return np.sort(matrix, axis=0)


def eventually(holds: Callable[[], bool], timeout: float = 30.0) -> None:
    """Wait until the condition holds; generously, because CI runs many processes at a time on two cores."""
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, "the condition did not hold in time"
        time.sleep(0.01)
