"""Checks before a federation starts: all failures at once, each with its fix."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_privacy.addresses import parse
from fl_privacy.coding import FLOAT32
from fl_privacy.config import Federation
from fl_privacy.deploy.preflight.finding import Check
from fl_privacy.deploy.preflight.reach import peer
from fl_privacy.errors import DataError, DataProblems, FederationError, LaunchError
from fl_privacy.files import OTHERS, mode_of
from fl_privacy.identity.keyring import Identity, Keyring

if TYPE_CHECKING:
    from fl_privacy.tasks.workload import Workload

FLOWER = "1.41.0"
SPARE_DISK = 200 * 2**20
FIX_DATA = "correct the files, the task or where the data are (the sites' `data`, --data-dir or FL_PRIVACY_DATA)"
LISTED = 5  # sites with problems; the rest is counted
PLAIN = "openssl pkcs8 -topk8 -nocrypt -in"


def run(
    federation: Federation,
    runs_dir: Path,
    data_dir: Path | None,
    listen: list[str],
    keys: Path | None,
    peers: list[str],
) -> list[Check]:
    """Run all checks, whatever fails."""
    checks = [flower_version(), disk(runs_dir, transcript_bytes(federation)), data(federation, data_dir)]
    checks += devices(federation)
    checks += [port(address) for address in listen or ["127.0.0.1:0"]]
    authority = runs_dir / "pki" / "ca.pem"
    if keys is None and authority.exists():
        checks.append(dates("authority", x509.load_pem_x509_certificate(authority.read_bytes())))
    if keys is not None:
        checks += list(certificates(federation, Keyring(keys)))
        checks += [peer(address, Keyring(keys)) for address in peers]
    return checks


def flower_version() -> Check:
    found = version("flwr")
    fix = "" if found == FLOWER else f"pip install flwr=={FLOWER}"
    return Check("flower", not fix, f"flwr {found}", fix)


def disk(runs_dir: Path, needed: int = SPARE_DISK) -> Check:
    """Free space for the runs."""
    place = runs_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**20:,.0f} MiB free in {runs_dir}, about {needed / 2**20:,.0f} MiB needed"
    return Check("disk", free >= needed, detail, "" if free >= needed else "free some space or use another --runs-dir")


def transcript_bytes(federation: Federation) -> int:
    """A model and a cohort of updates per round, plus room for logs."""
    from fl_privacy.tasks.workload import layout_of

    parameters = layout_of(federation).size
    a_round = FLOAT32.nbytes(parameters) + federation.cohort * federation.coding.nbytes(parameters)
    return SPARE_DISK + federation.rounds * a_round


def data(federation: Federation, data_dir: Path | None, sites: Sequence[str] = (), fix: str = FIX_DATA) -> Check:
    """Read the records of these sites (default: all), each from its own folder; with them, a model can be judged."""
    try:
        with redirect_stdout(sys.stderr):  # what a task of one's own prints is no part of the checks
            return Check("data", True, _read(federation, data_dir, list(sites or federation.site_names)))
    except FederationError as error:
        return Check.failed("data", error, fix)


def _read(federation: Federation, data_dir: Path | None, sites: list[str]) -> str:
    """What there is, in words."""
    from fl_privacy.steps.base import Seat
    from fl_privacy.tasks.workload import Workload

    label, task = federation.task.label, federation.task
    if not task.is_own and not task.data_set.needs_data:
        return f"{label} is bundled"
    work = Workload(federation, data_dir)
    train, held_out = _records(work, sites)
    if task.is_own:
        for site in sites:
            work.check_model(work.site_data(site))
        first = work.site_data(sites[0])
        federation.privatise.start(Seat(federation, sites[0], work, len(first), None))
    return f"{label}: {train} training and {held_out} held-out records"


def _records(work: Workload, sites: Sequence[str]) -> tuple[int, int]:
    """How many records the sites have for training and held out; the problems of all of them are named at once."""
    problems = dict[str, FederationError]()
    train = held_out = 0
    for site in sites:
        try:
            train += len(work.site_data(site))
            held_out += len(work.held_out(site))
        except FederationError as error:
            problems[str(error)] = error
            if not work.federation.task.by_site:
                break  # all sites read the same files
    if problems:
        raise _together(list(problems.values()))
    return train, held_out


def _together(errors: list[FederationError]) -> FederationError:
    """The errors of several sites as one."""
    if len(errors) == 1:
        return errors[0]
    more = [f"and {len(errors) - LISTED} more sites"] if len(errors) > LISTED else []
    listed = [line.removeprefix("data: ") for error in errors[:LISTED] for line in error.lines]
    return DataProblems(f"data: problems at {len(errors)} sites", listed + more)


def find_data(federation: Federation, data_dir: Path | None) -> None:
    """Raise unless everyone who reads data has some. Only files of one's own are read: they may be wrong."""
    from fl_privacy.tasks import files

    task = federation.task
    if task.is_own or not task.data_set.pooled:
        _read(federation, data_dir, list(federation.site_names))
        return
    if not task.data_set.needs_data:
        return
    readers = {} if federation.sites_evaluate else {"server": data_dir}
    readers |= {site.name: site.data or data_dir for site in federation.sites}
    missing: dict[Path, list[str]] = {}
    for name, given in readers.items():
        folder = files.folder(given, task.dataset) / task.dataset
        if not os.access(folder, os.R_OK | os.X_OK):
            missing.setdefault(folder, []).append(name)
    if missing:
        listed = "; ".join(f"{folder} of {names[0]}{', ...' * bool(names[1:])}" for folder, names in missing.items())
        fix = f"correct --data-dir, {files.ENVIRONMENT} or the site's `data`"
        raise DataError(f"data: does not exist or cannot be read: {listed}; {fix}")


def devices(federation: Federation) -> Iterator[Check]:
    from fl_privacy.tasks.train import device

    for name in sorted({site.device for site in federation.sites}):
        try:
            device(name)
            yield Check("device", True, name)
        except FederationError as error:
            yield Check.failed("device", error, "set the sites' device to cpu, or run where the GPU is")


def port(address: str) -> Check:
    """Whether we could listen there."""
    try:
        host, number = parse(address)
    except LaunchError:
        return Check("port", False, f"{address}: not host:port", "write it as 127.0.0.1:8443")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, number))
    except OSError as error:
        return Check("port", False, f"{address}: {error.strerror}", "choose another port, or stop what uses it")
    return Check("port", True, f"{address} is free" if number else f"{host} has free ports")


def dates(name: str, certificate: x509.Certificate) -> Check:
    now = dt.datetime.now(dt.UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        return Check(name, False, f"certificate: expired on {end:%Y-%m-%d}", "renew it: fl-privacy pki renew KIT")
    if now < start:
        return Check(name, False, f"certificate: valid from {start:%Y-%m-%d %H:%M} UTC", "set this machine's clock")
    return Check(name, True, f"certificate valid until {end:%Y-%m-%d}")


def exposed(path: Path) -> Check | None:
    """A secret that other users could use; None if it is its owner's alone, or not there."""
    if not (mode := mode_of(path)) & OTHERS:
        return None
    fix = f"chmod {'700' if path.is_dir() else '600'} {path}"
    return Check("modes", False, f"{path}: mode {mode:04o} lets other users in", fix)


def certificates(federation: Federation, keys: Keyring) -> Iterator[Check]:
    """Whether our own key, certificate and authority belong together and to this federation."""
    if found := exposed(keys.key_file):
        yield found
        return
    try:
        key, certificate_pem, authority_pem = keys.read()
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        authority = x509.load_pem_x509_certificate(authority_pem)
        private = load_pem_private_key(key, None)
    except (FederationError, ValueError) as error:
        why = "not in PEM: one of key.pem, cert.pem and ca.pem is damaged" if isinstance(error, ValueError) else error
        yield Check("keys", False, f"{keys.folder}: {why}", "restore it, or install the signed file again")
        return
    except (TypeError, UnsupportedAlgorithm) as error:
        yield Check("keys", False, f"{keys.key_file}: {error}", f"store it without a password: {PLAIN} {keys.key_file}")
        return
    yield dates("certificate", certificate)
    yield _holds(
        "authority",
        lambda: certificate.verify_directly_issued_by(authority),
        "the authority signed this certificate",
        "the certificate is not signed by ca.pem",
        "use ca.pem and cert.pem of the same federation",
    )
    matches = private.public_key() == certificate.public_key()
    yield Check("key", matches, "key and certificate " + ("belong together" if matches else "do not belong together"),
                "" if matches else "use the key that the certificate was made for")  # fmt: skip
    try:
        identity = Identity.of(certificate)
    except FederationError:
        yield Check("identity", False, "certificate: has no fl-privacy identity", "use one issued by fl-privacy")
        return
    ours = identity.federation == federation.name
    fix = "" if ours else f"use a certificate of federation {federation.name!r}"
    yield Check("identity", ours, identity.uri, fix)


def _holds(name: str, test: Callable[[], None], good: str, bad: str, fix: str) -> Check:
    try:
        test()
    except (ValueError, TypeError, InvalidSignature):
        return Check(name, False, bad, fix)
    return Check(name, True, good)
