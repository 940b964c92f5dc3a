"""Who signed a document of a run: ECDSA over P-256, certificates from one CA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification

from fl_privacy.errors import TranscriptError
from fl_privacy.transcript.files import canonical, first_line

HEAD_DOMAIN = b"fl-privacy/transcript/v1/head\0"
MANIFEST_DOMAIN = b"fl-privacy/transcript/v3/manifest\0"
DETACHED_DOMAIN = b"fl-privacy/transcript/v1/manifest\0"  # of manifest.sig.json, before format 3
IDENTITY = re.compile(r"fl-privacy://([^/]+)/([^/]+)/([^/]+)")
BAD_X509 = (x509.DuplicateExtension, x509.ExtensionNotFound, x509.InvalidVersion, x509.UnsupportedGeneralNameType)
MALFORMED = (KeyError, TypeError, ValueError, UnsupportedAlgorithm, *BAD_X509)
TIME = "%Y-%m-%dT%H:%M:%SZ"


class Identity(NamedTuple):
    """The URI in a certificate, `fl-privacy://<federation>/<role>/<name>`."""

    federation: str
    role: str
    name: str


class Signature(NamedTuple):
    """A signature that holds: by which certificate (and its intermediates), and when by the signer's own clock."""

    certificates: list[x509.Certificate]
    signed_at: datetime


class Signer:
    """A private key and the certificate that names its owner."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate_pem: bytes | str) -> None:
        pem = certificate_pem.encode() if isinstance(certificate_pem, str) else certificate_pem
        try:
            chain = x509.load_pem_x509_certificates(pem)
        except ValueError:
            raise TranscriptError("certificate: no PEM certificate in it; pass the one of the observer") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise TranscriptError("key: transcripts are signed with ECDSA on P-256; make such a key")
        if chain[0].public_key() != key.public_key():
            raise TranscriptError("certificate: belongs to another key; pass the pair that was issued together")
        self._key, self._leaf = key, chain[0]
        self._certificate = "".join(c.public_bytes(serialization.Encoding.PEM).decode() for c in chain)

    @property
    def identity(self) -> Identity:
        return _identity(self._leaf, "certificate")

    def dated(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """`document` with the time and the certificate: what is signed."""
        return {**document, "signed_at": utc_now(), "certificate": self._certificate}

    def signature(self, message: bytes) -> str:
        return self._key.sign(message, ec.ECDSA(hashes.SHA256())).hex()

    def sign(self, domain: bytes, document: Mapping[str, Any]) -> dict[str, Any]:
        """`document` with time, certificate, and a signature over all of these."""
        body = self.dated(document)
        return {**body, "signature": self.signature(message_of(domain, body))}

    def check_own(self, message: bytes, document: Mapping[str, Any], where: str) -> None:
        """Refuse to go on from a document that this key did not sign."""
        if check_signature(message, document, where).certificates[0].public_key() != self._key.public_key():
            raise TranscriptError(f"{where}: signed by another key; continue with that key or start a new run")


def utc_now() -> str:
    return datetime.now(UTC).strftime(TIME)


def message_of(domain: bytes, document: Mapping[str, Any]) -> bytes:
    """What is signed of a document in canonical form."""
    return domain + canonical({key: value for key, value in document.items() if key != "signature"})


def check_signature(message: bytes, document: Mapping[str, Any], where: str) -> Signature:
    """The signature over `message` that a document carries, by the certificate beside it: not yet who that is."""
    try:
        certificates = x509.load_pem_x509_certificates(str(document["certificate"]).encode())
        signed_at = datetime.strptime(document["signed_at"], TIME).replace(tzinfo=UTC)
        signature = bytes.fromhex(document["signature"])
        key = certificates[0].public_key()
    except MALFORMED:
        raise TranscriptError(f"{where}: signature, certificate or time is missing or malformed") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise TranscriptError(f"{where}: the certificate's key is not on P-256")
    if signature.hex() != document["signature"]:
        raise TranscriptError(f"{where}: the signature is not lower-case hexadecimal")
    try:
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        raise TranscriptError(f"{where}: the signature does not fit the content, which was changed") from None
    return Signature(certificates, signed_at)


def load_anchors(ca_pem: bytes) -> verification.Store:
    try:
        return verification.Store(x509.load_pem_x509_certificates(ca_pem))
    except ValueError:
        raise TranscriptError("ca: no PEM certificate in it; pass the federation's CA certificate") from None


def identify(message: bytes, document: Mapping[str, Any], anchors: verification.Store, where: str) -> Identity:
    """Who signed a document, if the certificate leads to the CA and was valid when it signed."""
    (leaf, *others), signed_at = check_signature(message, document, where)
    policy = verification.PolicyBuilder().store(anchors).time(signed_at)
    verifier = policy.extension_policies(ca_policy=_CA_POLICY, ee_policy=_LEAF_POLICY).build_client_verifier()
    try:
        verifier.verify(leaf, others)
    except (verification.VerificationError, *MALFORMED) as error:
        raise TranscriptError(f"{where}: the certificate does not lead to the CA given ({first_line(error)})") from None
    return _identity(leaf, where)


def _identity(leaf: x509.Certificate, where: str) -> Identity:
    """The one identity that a certificate names."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except MALFORMED as error:
        raise TranscriptError(f"{where}: the certificate names nobody ({first_line(error)})") from None
    found = [m for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if (m := IDENTITY.fullmatch(uri))]
    if len(found) != 1:
        raise TranscriptError(f"{where}: the certificate names {len(found)} fl-privacy:// identities, not one")
    return Identity(*found[0].groups())


def _is_ca(_: verification.Policy, __: x509.Certificate, constraints: x509.BasicConstraints) -> None:
    if not constraints.ca:
        raise ValueError("the issuer is not a CA")


def _is_leaf(_: verification.Policy, __: x509.Certificate, constraints: x509.BasicConstraints | None) -> None:
    if constraints is not None and constraints.ca:
        raise ValueError("a CA signs certificates, not transcripts")


def _may_issue(_: verification.Policy, __: x509.Certificate, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("the issuer may not sign certificates")


_ANY = verification.Criticality.AGNOSTIC
_ALL = verification.ExtensionPolicy.permit_all()
_CA_POLICY = _ALL.require_present(x509.BasicConstraints, _ANY, _is_ca).may_be_present(x509.KeyUsage, _ANY, _may_issue)
_NAMED = _ALL.require_present(x509.SubjectAlternativeName, _ANY, None)
_LEAF_POLICY = _NAMED.may_be_present(x509.BasicConstraints, _ANY, _is_leaf)
