"""How a party gets its certificate: it makes its own key and a request; the authority signs; the party installs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fl_privacy.config import Federation
from fl_privacy.deploy import rosters
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.errors import LaunchError, ProtocolError
from fl_privacy.files import write_public, write_secret
from fl_privacy.identity import pki, requests
from fl_privacy.identity.accepted import is_accepted
from fl_privacy.identity.keyring import Identity, Keyring, load_crl
from fl_privacy.identity.pki import Authority, Record, load_certificate, load_key
from fl_privacy.identity.roster import install as install_roster
from fl_privacy.identity.signing import fingerprint, sign_text, verify_text
from fl_privacy.roles import ROLES

MAX_DAYS = 825
_CRL = b"-----BEGIN X509 CRL-----"


def party(kit: Path) -> tuple[Identity, tuple[str, ...]]:
    """Whose kit it is, and the host names of its certificate."""
    folder = Folder.open(kit)
    return folder.identity, requests.hosts_of(folder.identity, folder.kit.hosts, f"kit {kit / 'kit.yaml'}")


def request(kit: Path, out: Path | None = None) -> tuple[Path, requests.CheckedRequest]:
    """Request a first certificate. The key is made here, once, and stays here."""
    keys = Keyring(kit / "keys")
    if keys.certificate_file.exists() and keys.key_file.exists():
        raise LaunchError(f"kit {kit}: already has a certificate; use `fl-privacy pki renew {kit}`")
    identity, hosts = party(kit)
    return _write_request(kit, identity, hosts, _own_key(keys.key_file), None, out)


def renew(kit: Path, new_key: bool = False, out: Path | None = None) -> tuple[Path, requests.CheckedRequest]:
    """Request the next certificate, for the same key or a new one; the old key proves who asks."""
    keys = Keyring(kit / "keys")
    identity, hosts = party(kit)
    if not keys.certificate_file.exists() or not keys.key_file.exists():
        raise LaunchError(f"kit {kit}: has no certificate to renew; use `fl-privacy pki request {kit}`")
    old, certificate = load_key(keys.key_file), load_certificate(keys.certificate_file)
    text = certificate.public_bytes(serialization.Encoding.PEM).decode()
    key = _own_key(_next_key(keys)) if new_key else old
    return _write_request(kit, identity, hosts, key, (old, text), out)


def _write_request(
    kit: Path,
    identity: Identity,
    hosts: tuple[str, ...],
    key: ec.EllipticCurvePrivateKey,
    old: tuple[ec.EllipticCurvePrivateKey, str] | None,
    out: Path | None,
) -> tuple[Path, requests.CheckedRequest]:
    csr = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]))
        .add_extension(pki.alternative_names(identity, hosts), critical=False)
        .sign(key, hashes.SHA256())
    )
    node = _node_key(Folder.open(kit).node_key) if ROLES[identity.role].has_node else None
    text = csr.public_bytes(serialization.Encoding.PEM).decode()
    made = requests.Request(identity=identity.uri, hosts=hosts, csr=text, node=node)
    proof: dict[str, Any] = {"signature": sign_text(key, made.payload)}
    if old is not None:
        proof["renewal"] = requests.Renewal(certificate=old[1], signature=sign_text(old[0], made.payload))
    made = made.model_copy(update=proof)
    target = out or kit
    target = target / f"{identity.name}.request.json" if target.is_dir() else target
    write_public(target, made.model_dump_json(indent=1).encode())
    return target, requests.check(made, target)


def sign(
    authority: Authority,
    files: Sequence[Path],
    days: int | None = None,
    out: Path | None = None,
    replace: bool = False,
    federation: Federation | None = None,
) -> list[dict[str, Any]]:
    """Sign requests: all of them, or none if one is refused. No other party's certificate changes.

    With `federation`, the files bring along its next roster, which has the new keys.
    """
    if days is not None and not 1 <= days <= MAX_DAYS:
        raise LaunchError(f"days: {days} was given; use 1 to {MAX_DAYS}")
    asked = [requests.check(requests.read(requests.Request, path, "request"), path) for path in files]
    for request in asked:
        named = request.identity.federation
        if federation is not None and named != federation.name:
            raise LaunchError(f"request {request.source}: of federation {named!r}, not {federation.name!r}")
    with authority.locked():
        _admit(authority, asked, replace)
        certificates = [authority.certify(one.identity, one.key, one.request.hosts, days) for one in asked]
        if federation is not None:
            rosters.enlist(federation, authority)
        made = [_hand_out(authority, *pair, out) for pair in zip(asked, certificates, strict=True)]
        records, revoked = authority.records(), authority.revoked()
    for one in made:
        one["shared"] = shared(one["hosts"], one["identity"], records, revoked)
    return made


def _admit(authority: Authority, asked: Sequence[requests.CheckedRequest], replace: bool) -> None:
    """Refuse requests that contradict what the authority signed or revoked before."""
    records, revoked, batch = authority.records(), authority.revoked(), set[str]()
    barred = {record.key for record in records if record.number in revoked}
    for one in asked:
        where, uri = f"request {one.source}", one.identity.uri
        if authority.federation not in ("", one.identity.federation):
            raise LaunchError(f"{where}: of federation {one.identity.federation!r}, not {authority.federation!r}")
        if one.identity.name in batch:
            raise LaunchError(f"{where}: a second request for {one.identity.name}; sign it on its own")
        batch.add(one.identity.name)
        if fingerprint(one.key) in barred:
            raise LaunchError(f"{where}: its key was revoked; make a new one with `fl-privacy pki renew --new-key`")
        known = {record.key for record in records if record.identity == uri}
        if known and fingerprint(one.key) not in known and not replace:
            _check_renewal(authority, one)
        if known and not replace:
            _check_hosts(one, records, revoked)


def _check_hosts(one: requests.CheckedRequest, records: Sequence[Record], revoked: frozenset[int]) -> None:
    """A renewal is signed without checking back, so it may add no host name: sites trust a peer by its host name."""
    uri = one.identity.uri
    newest = max(record.since for record in records if record.identity == uri)
    had = {_plain(host) for r in records if r.identity == uri and r.since == newest for host in r.hosts}
    for host in one.request.hosts:
        if _plain(host) not in had:
            others = shared([host], uri, records, revoked)
            of = f" (which belongs to {', '.join(others)})" if others else ""
            raise LaunchError(
                f"request {one.source}: {uri} asks for host {host}{of}, which its last certificate does not have; "
                "remove it from the kit's hosts, or if you know that the party uses this name, sign with --replace"
            )


def shared(hosts: Sequence[str], uri: str, records: Sequence[Record], revoked: frozenset[int]) -> list[str]:
    """Other identities that have a valid certificate for one of these hosts."""
    wanted = set(map(_plain, hosts))
    valid = [r for r in records if r.identity != uri and not r.expired and r.number not in revoked]
    return sorted({r.identity for r in valid if wanted & set(map(_plain, r.hosts))})


def _plain(host: str) -> str:
    """A name or address in its canonical spelling."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def _check_renewal(authority: Authority, one: requests.CheckedRequest) -> None:
    """The old key vouches for the new one as long as its own certificate is valid."""
    try:
        if one.request.renewal is None:
            raise ValueError
        old = x509.load_pem_x509_certificate(one.request.renewal.certificate.encode())
        old.verify_directly_issued_by(authority.certificate)
        if Identity.of(old) != one.identity:
            raise ValueError
        verify_text(old.public_key(), one.request.renewal.signature, one.request.payload)
        if old.serial_number in authority.revoked():
            raise LaunchError(
                f"request {one.source}: the certificate of {one.identity.uri} was revoked, so its old key cannot "
                "vouch for the new one; compare the fingerprint and sign with --replace"
            )
        Keyring(authority.folder).refuse_revoked(old)
    except (*requests.BROKEN, ProtocolError):
        raise LaunchError(
            f"request {one.source}: {one.identity.uri} has a certificate for another key; "
            "the party must use `fl-privacy pki renew`, or if you know that it lost its key, sign with --replace"
        ) from None


def _hand_out(
    authority: Authority, one: requests.CheckedRequest, certificate: x509.Certificate, out: Path | None
) -> dict[str, Any]:
    revoked, roster = authority.revocations(), authority.roster_file(one.identity.federation)
    made = requests.Signed(
        identity=one.identity.uri,
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        ca=authority.pem.decode(),
        node=one.request.node,
        revoked=None if revoked is None else revoked.decode(),
        roster=roster.read_text() if authority.roster(one.identity.federation) else None,
    )
    made = made.model_copy(update={"signature": sign_text(authority.key, made.payload)})
    target = (out or one.source.parent) / f"{one.identity.name}.signed.json"
    write_public(target, made.model_dump_json(indent=1, exclude_none=True).encode())
    until = certificate.not_valid_after_utc.isoformat()
    return {**one.describe(), "serial": f"{certificate.serial_number:x}", "until": until, "file": str(target)}


def install(kit: Path, file: Path) -> dict[str, Any]:
    """Install what the authority sent: our certificate, its revocations or roster or, at a superlink, a node key.

    `accept` is the serial of a roster that the site's operator has yet to accept.
    """
    found, folder = _install(kit, file), Folder.open(kit)
    listed = Keyring(folder.keys.folder)
    if not folder.role.has_node or not listed.roster_file.exists() or is_accepted(listed.roster(), folder.state):
        return found
    return {**found, "accept": listed.roster().serial}


def _install(kit: Path, file: Path) -> dict[str, Any]:
    identity, _ = party(kit)
    data = requests.bounded(file, requests.MAX_SIGNED, "file")
    if data.lstrip().startswith(_CRL):
        return _install_crl(kit, file, data)
    if rosters.is_one(data):
        return rosters.install(Keyring(kit / "keys"), identity.federation, file, data)
    signed = requests.read(requests.Signed, file, "signed file", requests.MAX_SIGNED)
    where = f"signed file {file}"
    keys = Keyring(kit / "keys")
    certificate = _check_signed(signed, keys, where)
    whose = Identity.of(certificate)
    if whose == identity:
        return _install_own(keys, signed, certificate, where)
    if ROLES[identity.role].has_gate and ROLES[whose.role].has_node and whose.federation == identity.federation:
        return _install_node(kit, whose, signed, where)
    raise LaunchError(f"{where}: is for {whose.uri}, and this kit belongs to {identity.uri}; install it there")


def _check_signed(signed: requests.Signed, keys: Keyring, where: str) -> x509.Certificate:
    """Check that the authority of this kit signed all of it, and that it is valid today."""
    try:
        authority = x509.load_pem_x509_certificate(signed.ca.encode())
        known = keys.authority_file
        if known.exists() and x509.load_pem_x509_certificate(known.read_bytes()) != authority:
            raise LaunchError(f"{where}: signed by another authority than {known}; ask that one to sign")
        certificate = x509.load_pem_x509_certificate(signed.certificate.encode())
        certificate.verify_directly_issued_by(authority)
        verify_text(authority.public_key(), signed.signature, signed.payload)
        if Identity.of(certificate).uri != signed.identity:
            raise ValueError
        if signed.revoked is not None:
            load_crl(signed.revoked.encode(), authority)
        if signed.roster is not None:
            rosters.check(signed.roster.encode(), authority, Identity.of(certificate).federation)
    except (*requests.BROKEN, ProtocolError):
        raise LaunchError(f"{where}: not as its authority signed it; ask for it again") from None
    keys.refuse_revoked(certificate)
    if dt.datetime.now(dt.UTC) < certificate.not_valid_before_utc:
        raise LaunchError(f"{where}: valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; set the clock")
    return certificate


def _install_own(keys: Keyring, signed: requests.Signed, certificate: x509.Certificate, where: str) -> dict[str, Any]:
    pending = _next_key(keys)
    held = [file for file in (keys.key_file, pending) if file.exists()]
    fits = [file for file in held if load_key(file).public_key() == certificate.public_key()]
    if not fits:
        fix = "make a new request: `fl-privacy pki request`"
        raise LaunchError(f"{where}: for a key that this kit does not have; {fix}")
    # A process that reads between these steps sees files that do not belong together, and keeps its old ones.
    if fits[0] == pending:
        pending.replace(keys.key_file)
    write_public(keys.authority_file, signed.ca.encode())
    _install_brought(keys, signed)
    write_public(keys.certificate_file, signed.certificate.encode())
    authority = x509.load_pem_x509_certificate(signed.ca.encode())
    return {
        "installed": "certificate",
        "identity": signed.identity,
        "until": certificate.not_valid_after_utc.isoformat(),
        "authority": fingerprint(authority.public_key()),
        "file": str(keys.certificate_file),
    }


def _install_node(kit: Path, site: Identity, signed: requests.Signed, where: str) -> dict[str, Any]:
    keys = Keyring(kit / "keys")
    if not keys.authority_file.exists():
        raise LaunchError(f"{where}: this kit has no authority yet; install its own signed file first")
    if signed.node is None:
        raise LaunchError(f"{where}: has no node key; the site must make a new request")
    _install_brought(keys, signed)
    target = kit / "nodes" / f"{site.name}.pub"
    write_public(target, signed.node.encode())
    return {"installed": "node", "identity": site.uri, "file": str(target)}


def _install_brought(keys: Keyring, signed: requests.Signed) -> None:
    """Install the revocations and the roster in a signed file, unless newer ones are in place."""
    authority = load_certificate(keys.authority_file)
    if signed.revoked is not None:
        pki.install_crl(keys.revoked_file, signed.revoked.encode(), authority)
    if signed.roster is not None:
        install_roster(keys.roster_file, signed.roster.encode(), authority)


def _install_crl(kit: Path, file: Path, data: bytes) -> dict[str, Any]:
    keys = Keyring(kit / "keys")
    try:
        authority = x509.load_pem_x509_certificate(keys.authority_file.read_bytes())
        crl = pki.install_crl(keys.revoked_file, data, authority)
    except (FileNotFoundError, ValueError):
        raise LaunchError(f"revocations {file}: not signed by the authority in {keys.authority_file}") from None
    if crl is None:
        raise LaunchError(f"revocations {file}: older than those in place; use the authority's newest revoked.pem")
    return {"installed": "revocations", "count": len(crl), "file": str(keys.revoked_file)}


def find(authority: Authority, name: str) -> str:
    """The identity with this name, role/name or URI in the authority's records."""
    known = sorted({record.identity for record in authority.records()})
    found = [uri for uri in known if uri == name or uri.endswith(f"/{name}")]
    if not found:
        raise LaunchError(f"name: {name!r} has no certificate from this authority; see `fl-privacy pki list`")
    if len(found) > 1:
        raise LaunchError(f"name: {name!r} is ambiguous; use one of {', '.join(found)}")
    return found[0]


def _next_key(keys: Keyring) -> Path:
    """Where a new key waits for its certificate."""
    return keys.folder / "key.next.pem"


def _own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in that file, made if there is none: a lost request can be made again."""
    if not path.exists():
        write_secret(path, pki.pem(ec.generate_private_key(ec.SECP256R1())))
    path.chmod(0o600)
    return load_key(path)


def _node_key(path: Path) -> str:
    from fl_privacy.deploy.flower import node_key

    if not path.exists():
        made = node_key(path)
        # `provision --sign` reads it from there.
        write_public(path.with_name("node.pub"), made)
        return made.decode()
    path.chmod(0o600)
    try:
        public = serialization.load_ssh_private_key(path.read_bytes(), None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise LaunchError(f"node key {path}: cannot be read; remove it to make a new one") from None
    encoded = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return encoded.decode()
