"""`fl-privacy preflight KIT`: can this role start here and reach its peers? All failures at once, within seconds."""

from __future__ import annotations

import ctypes
import datetime as dt
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fl_privacy.addresses import host_of
from fl_privacy.config import Address
from fl_privacy.config.policy import Policy, policy_file
from fl_privacy.deploy import ledgers
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.parties import called, parties
from fl_privacy.deploy.preflight import checks, guard
from fl_privacy.deploy.preflight.finding import Check
from fl_privacy.deploy.preflight.reach import NO_PASSWORD, dialogue, greet, peer
from fl_privacy.dialling import Unreachable, Way
from fl_privacy.errors import FederationError
from fl_privacy.identity.accepted import is_accepted
from fl_privacy.identity.keyring import Identity, Keyring

Test = Callable[[], Iterable[Check]]

SKEW = 60.0
SET_CLOCK = "set this machine's clock (systemctl enable --now systemd-timesyncd)"
TIMEX_BYTES, TIME_ERROR = 512, 5  # adjtimex(2): more than its struct, which changes nothing if it is all zero
LONGEST = 2.2  # seconds to wait for a peer
SOON = dt.timedelta(days=7)
LONGEST_SOCKET = 100
GREETING = b"GET / HTTP/1.1\r\nHost: gate\r\n\r\n"


def run(folder: Folder, reach: bool = True) -> list[Check]:
    """Run all checks at once, whatever fails. Without `reach`, only those of this machine."""
    kit = folder.kit
    here: list[tuple[str, Test]] = [
        ("flower", lambda: [checks.flower_version()]),
        ("disk", lambda: [_room(folder)]),
        ("certificate", lambda: _certificates(folder)),
        ("roster", lambda: _roster(folder)),
        ("modes", lambda: guard.modes(folder)),
        ("port", lambda: _listening(folder)),
        ("data", lambda: data(folder)),
        ("device", lambda: _device(folder)),
        ("site", lambda: _site(folder)),
        ("confinement", lambda: guard.confinement(folder)),
        ("clock", lambda: _own_clock(folder)),
    ]
    there: list[tuple[str, Test]] = []
    asked = []
    if reach:
        if kit.superlink:
            there.append((kit.superlink, lambda: _gate(folder)))
        elif not folder.role.has_gate and folder.federation.hosts:
            asked.append(_Probe("clock", lambda: _clock(_date(folder)), []))
        there += [(address, partial(_peer, folder, address, whom)) for address, whom in _dialled(folder)]
    asked += [_Probe(*test) for test in there]
    done = [check for test in here for check in _Probe(*test).wait()]
    until = time.monotonic() + LONGEST
    return done + [check for one in asked for check in one.wait(max(0.0, until - time.monotonic()))]


class _Probe:
    """A check in a thread of its own, abandoned when its time is up: a name server may never answer."""

    def __init__(self, what: str, test: Test, late: list[Check] | None = None) -> None:
        self._what, self._test = what, test
        fix = "check that a name server is configured and reachable"
        self._found = [Check("peer", False, f"{what}: no answer within {LONGEST:g} s", fix)] if late is None else late
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = list(self._test())
        except Exception as error:  # reported as this check's finding, so that it hides no other
            why = str(error) if isinstance(error, OSError | ValueError | FederationError) else repr(error)
            self._found = [Check("check", False, f"{self._what}: {why}", "fix the file or device that it names")]

    def wait(self, seconds: float | None = None) -> list[Check]:
        self._thread.join(seconds)
        return self._found


def _room(folder: Folder) -> Check:
    where = folder.path / folder.kit.runs if folder.role.starts_runs else folder.state
    found = checks.disk(where)
    return found if found.ok else Check("disk", False, found.detail, "free some space or move the kit to a larger disk")


def _certificates(folder: Folder) -> list[Check]:
    if not folder.keys.certificate_file.exists():
        fix = f"run fl-privacy pki request {folder.path}, have it signed, and install the answer"
        return [Check("certificate", False, "none yet", fix)]
    if checks.exposed(folder.keys.key_file):
        return []  # reported with the other modes
    found = list(checks.certificates(folder.federation, folder.keys))
    try:
        certificate = x509.load_pem_x509_certificate(folder.keys.certificate_file.read_bytes())
        identity = Identity.of(certificate)
    except (OSError, ValueError, FederationError):
        return found
    if identity != folder.identity:
        fix = "install the certificate that was signed for this kit's request"
        found.append(Check("identity", False, f"certificate: is {identity.uri}, the kit {folder.identity.uri}", fix))
    left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    if dt.timedelta() < left < SOON:
        found.append(
            Check("renewal", True, f"certificate expires in {left.days} days", f"fl-privacy pki renew {folder.path}")
        )
    return found


def _roster(folder: Folder) -> list[Check]:
    """Whether everybody will know this party, and it them."""
    if folder.idle:
        return []
    install = f"fl-privacy pki install {folder.path} roster.json"
    keys = Keyring(folder.keys.folder)
    try:
        found = keys.roster()
    except FederationError as error:
        return [Check.failed("roster", error, f"ask the authority for it (fl-privacy pki roster), then {install}")]
    try:
        keys.refuse_unlisted(x509.load_pem_x509_certificate(keys.certificate_file.read_bytes()))
    except (OSError, ValueError):
        pass  # another check reports it
    except FederationError as error:
        return [Check("roster", False, f"our {error}", f"ask the authority for the newest one, then {install}")]
    if folder.role.has_node and not is_accepted(found, folder.state):
        return [
            Check("roster", False, f"serial {found.serial} is not accepted", f"fl-privacy site accept {folder.path}")
        ]
    missing = [name for role, name in parties(folder.federation) if found.key_of(role, name) is None]
    fix = f"once they have certificates: make the next one (fl-privacy pki roster), then {install}" if missing else ""
    absent = f"; without {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}" if missing else ""
    sites = found.organisations(site.name for site in found.sites)
    return [
        Check("roster", True, f"serial {found.serial}: {len(found.sites)} sites of {sites} organisations{absent}", fix)
    ]


def _listening(folder: Folder) -> list[Check]:
    """Whether the ports are free; a running role uses its own."""
    if folder.served:
        return []
    found = [] if folder.kit.listen is None else [checks.port(folder.kit.listen)]
    if folder.kit.metrics is not None and not checks.port(folder.kit.metrics).ok:
        fix = "set another `metrics` in kit.yaml, or null for none"
        found.append(Check("metrics", True, f"{folder.kit.metrics} is in use; the role runs without metrics", fix))
    return found


def _dialled(folder: Folder) -> list[tuple[Address, Identity]]:
    """Whom a kit calls by gRPC, and where."""
    kit = folder.kit
    given = {"middleware": kit.middleware, "evaluator": (kit.evaluator,) if kit.evaluator else ()}
    return [
        found
        for service, addresses in given.items()
        for found in zip(addresses, _called(folder, service), strict=False)
    ]


def _called(folder: Folder, service: str) -> list[Identity]:
    found = called(folder.federation, folder.role, folder.kit.name, service)
    return [Identity(folder.federation.name, *party) for party in found]


def _peer(folder: Folder, address: Address, whom: Identity) -> list[Check]:
    proxy = folder.kit.proxy
    return [(None if proxy else _named(address)) or peer(address, folder.keys, whom, proxy)]


def _named(address: Address) -> Check | None:
    """None if the name resolves."""
    host = host_of(address)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        fix = "correct the name, or add it to DNS or /etc/hosts"
        return Check("name", False, f"{host}: {error.strerror or error}", fix)
    return None


def _gate(folder: Folder) -> list[Check]:
    """Connect to the SuperLink's gate, and compare clocks by the date in its answer."""
    assert folder.kit.superlink is not None
    way = Way(folder.kit.superlink, folder.kit.proxy)
    if not way.proxy and (unknown := _named(way.address)):
        return [unknown]
    found, answer = dialogue(way, folder.keys, GREETING, "http/1.1", _called(folder, "superlink")[0])
    if not found.ok and "certificate" in found.detail:
        answer = _unchecked(folder, way)
    return [found, *_clock(answer)]


def _unchecked(folder: Folder, way: Way) -> bytes:
    """The gate's answer without checking its certificate: with a wrong clock, valid certificates look invalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.load_cert_chain(folder.keys.certificate_file, folder.keys.key_file, NO_PASSWORD)
        return greet(way, GREETING, "http/1.1", context)
    except (OSError, ValueError, Unreachable):
        return b""


def _date(folder: Folder) -> bytes:
    """The gate's answer to a party that may not use it, which has its date; empty if it cannot be reached."""
    assert folder.federation.hosts is not None
    return _unchecked(folder, Way(folder.federation.hosts.superlink, folder.kit.proxy))


def _own_clock(folder: Folder) -> list[Check]:
    """Without asking a peer: a clock earlier than the dates of local files and certificates is behind."""
    at, what = max(_made(folder), default=(0.0, ""))
    behind = at - time.time()
    if behind > SKEW:
        return [Check("clock", False, f"{behind:.0f} s or more behind {what}", SET_CLOCK)]
    ask = getattr(ctypes.CDLL(None), "adjtimex", None)  # Linux has it
    if ask is not None and ask(ctypes.create_string_buffer(TIMEX_BYTES)) == TIME_ERROR:
        return [Check("clock", True, "no time synchronisation detected", SET_CLOCK)]
    return []


def _made(folder: Folder) -> Iterator[tuple[float, str]]:
    """Dates set by other clocks, or earlier by this one; files that were copied here do not count."""
    for file in (folder.keys.certificate_file, folder.keys.authority_file):
        with suppress(OSError, ValueError):
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
            yield certificate.not_valid_before_utc.timestamp(), f"the start date of {file.name}"
    for made in (folder.logs, folder.state, folder.run):
        for file in made.glob("*"):
            with suppress(OSError):
                yield file.stat().st_mtime, f"{made.name}/{file.name}"


def _clock(answer: bytes) -> list[Check]:
    dates = [line[5:].strip() for line in answer.split(b"\r\n") if line.lower().startswith(b"date:")]
    if not dates:
        return []
    try:
        there = parsedate_to_datetime(dates[0].decode("ascii", "replace"))
        skew = (dt.datetime.now(dt.UTC) - there).total_seconds()
    except (ValueError, TypeError):
        return []
    detail = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the SuperLink's"
    return [Check("clock", abs(skew) <= SKEW, detail, "" if abs(skew) <= SKEW else SET_CLOCK)]


def data(folder: Folder) -> list[Check]:
    """Whether a role that reads data has any; the files themselves are not read."""
    from fl_privacy.tasks import files

    task, fix = folder.federation.task, "set `data` in kit.yaml to the folder that holds the data"
    if folder.role.has_node and task.by_site:
        return [_own_data(folder, f"correct the files, or {fix}")]
    evaluated_elsewhere = not folder.role.has_node and (folder.kit.evaluator or folder.federation.sites_evaluate)
    if not folder.role.data or evaluated_elsewhere or task.by_site or not task.data_set.needs_data:
        return []  # a server needs none where the sites or an evaluator evaluate
    try:
        where = files.folder(folder.at(folder.kit.data), task.dataset) / task.dataset
    except FederationError as error:
        return [Check.failed("data", error, fix)]
    if not os.access(where, os.R_OK | os.X_OK):
        return [Check("data", False, f"{where}: does not exist, or this user may not read it", fix)]
    return [Check("data", True, str(where))]


def _own_data(folder: Folder, fix: str) -> Check:
    """Read what this site will train on: every problem in its files is found before the federation waits for it."""
    federation, site, data = folder.own_federation, folder.kit.name, folder.at(folder.kit.data)
    if not federation.task.is_own:
        centre = federation.task.centre(site, federation.site_names.index(site))
        try:
            found = federation.task.data_set.of_site(centre, data)
        except FederationError as error:
            return Check.failed("data", error, fix)
        return Check("data", True, f"{len(found.train)} training and {len(found.held_out)} held-out records")
    from fl_privacy.tasks import accepted

    try:
        listed = Policy.load(folder.policy).code if folder.policy else ()
    except FederationError:
        listed = ()  # its own check says why
    try:
        accepted.check(federation, folder.state, listed)
    except FederationError as error:
        return Check.failed("task", error, f"fl-privacy site accept-task {folder.path}")
    return checks.data(federation, data, [site], fix)


def _device(folder: Folder) -> list[Check]:
    """From the driver's device files: importing torch would take as long as all other checks together."""
    if not folder.role.has_node:
        return []
    device = folder.own_federation.site(folder.kit.name).device
    if device == "cpu":
        return [Check("device", True, device)]
    number = int(device.partition(":")[2] or 0)
    if "+cpu" in version("torch"):
        return [Check("device", False, f"{device}: this torch has no CUDA", "install with TORCH=cuda")]
    there = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if number >= len(there):
        fix = "correct `device` in kit.yaml, or install the driver and pass the GPU to the container"
        return [Check("device", False, f"{device}: this machine has {len(there)} GPUs", fix)]
    return [Check("device", True, device)]


def _site(folder: Folder) -> list[Check]:
    if not folder.role.has_node:
        return []
    found = []
    socket_path = str(folder.run / "worker")
    if len(socket_path) > LONGEST_SOCKET:
        found.append(Check("path", False, f"{socket_path}: too long for a socket", "move the kit to a shorter path"))
    found += _node(folder)
    try:
        policy = policy_file(folder.own_federation, folder.kit.name, folder.state, folder.trial)
        found.append(
            Check("policy", True, "none: a trial on one machine" if policy is None else _policy(folder, policy))
        )
    except FederationError as error:
        fix = "agree with the federation's operator, or correct your policy"
        missing = f"fl-privacy site policy {folder.path} > {folder.path}/policy.yaml, then read and restrict it"
        return [*found, Check.failed("policy", error, fix if folder.policy else missing)]
    try:
        ledgers.check_unit(folder.own_federation, folder.kit.name, folder.state)
    except FederationError as error:
        found.append(Check.failed("ledger", error, "see Ledger and policy in docs/privacy.md"))
    return found


def _policy(folder: Folder, file: Path) -> str:
    """What it allows of the federation, in words."""
    policy, federation = Policy.load(file), folder.federation
    policy.check(federation, folder.kit.name)
    if federation.quorum >= policy.min_cohort:
        return str(file)
    return f"{file}; rounds of fewer than {policy.min_cohort} organisations go without this site (min_cohort)"


def _node(folder: Folder) -> list[Check]:
    """The key that authenticates the SuperNode to the SuperLink."""
    has_certificate = folder.keys.certificate_file.exists() and folder.keys.key_file.exists()
    fix = f"fl-privacy pki {'renew' if has_certificate else 'request'} {folder.path}"
    if not folder.node_key.exists():
        return [Check("node", False, "the SuperNode has no key", fix)]
    try:
        load_ssh_private_key(folder.node_key.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm):
        return [Check("node", False, f"{folder.node_key}: cannot be read", f"restore it, or remove it and {fix}")]
    return []
