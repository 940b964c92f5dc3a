"""A site's part in an agreement on the disk, encrypted: it holds the site's contribution and later the secret."""

from __future__ import annotations

import json
import secrets
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.agreement.conflicts import packed
from fl_privacy.agreement.machine import Agreement
from fl_privacy.agreement.messages import Message, as_list, loads, parse
from fl_privacy.agreement.terms import Terms
from fl_privacy.crypto import keys, sealing
from fl_privacy.errors import FederationError, ProtocolError

SALT = 32
PURPOSE = "agreement state"


def save(agreement: Agreement, key: bytes) -> bytes:
    """Everything that a restarted site needs, under a key of this file's own, derived from the site's secret key."""
    ballot = agreement.ballot
    values = {
        "site": agreement.site,
        "known": {site: key.hex() for site, key in agreement.terms.key_of.items()},
        "contribution": agreement.contribution.hex(),
        "decisions": [as_list(message) for message in agreement.decisions],
        "view": ballot.view,
        "accepted": _listed(ballot.accepted),
        "prepared": _listed(ballot.prepared),
        "own": [as_list(message) for message in ballot.own],
        "stopped": agreement.stopped,
        "heard": packed(agreement.witness.statements()).decode(),
    }
    salt = secrets.token_bytes(SALT)
    return salt + sealing.encrypt(_key(key, agreement.terms, salt), json.dumps(values).encode(), agreement.terms.scope)


def restore(data: bytes, key: bytes, terms: Terms, signer: ec.EllipticCurvePrivateKey) -> Agreement:
    """The agreement as it was saved; then `start` it. FederationError for what was saved for another one."""
    broken = "agreement: its file is damaged, or of another run, roster or round; start a new agreement"
    try:
        opened = sealing.decrypt(_key(key, terms, data[:SALT]), data[SALT:], terms.scope)
        return _restored(loads(opened), terms, signer)
    except (ProtocolError, KeyError, TypeError, ValueError):
        raise FederationError(broken) from None


def _restored(values: dict[str, Any], terms: Terms, signer: ec.EllipticCurvePrivateKey) -> Agreement:
    for site, key in values["known"].items():
        terms.learn(site, bytes.fromhex(key))
    agreement = Agreement(terms, values["site"], signer, bytes.fromhex(values["contribution"]))
    agreement.witness.examine(values["heard"].encode())
    for found in values["decisions"]:
        agreement.resume(parse(found))
    own = [parse(found) for found in values["own"]]
    agreement.ballot.resume(values["view"], _parsed(values["accepted"]), _parsed(values["prepared"]), own)
    agreement.stopped = values["stopped"]
    return agreement


def _listed(message: Message | None) -> list[Any] | None:
    return None if message is None else as_list(message)


def _parsed(found: Any) -> Message | None:
    return None if found is None else parse(found)


def _key(key: bytes, terms: Terms, salt: bytes) -> bytes:
    return keys.derive(key, terms.run, terms.round, salt.hex(), PURPOSE)
