"""Commit, then open: what the sites agree on first (commitments), then second (contributions), and the secret of both.

PBFT agrees on a value but does not make it random: a head that chose the secret could choose one that others know. So
the first value is a set of signed commitments and the second a set of contributions to these. The secret is HKDF over
at least f + 1 of them, one of which at least is of a correct site; all were committed to before anyone opened one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_privacy.agreement.messages import DIGEST, Message, Statement, Topic, as_list, loads, parse_statement
from fl_privacy.agreement.terms import Terms
from fl_privacy.crypto import keys, sealing
from fl_privacy.errors import ProtocolError, require

COMMITMENTS, CONTRIBUTIONS = 1, 2  # the two sequence numbers of an agreement


def commitment(terms: Terms, site: str, contribution: bytes) -> bytes:
    """A contribution has 256 random bits, so its digest hides it; with the site in it, nobody can copy it."""
    return hashlib.sha256(sealing.fields("commitment", terms.scope, site, contribution)).digest()


def digest(terms: Terms, height: int, before: bytes, value: bytes) -> bytes:
    """Of a value and, by `before`, of all that was agreed before: a quorum of commits to it is a checkpoint."""
    return hashlib.sha256(sealing.fields("value", terms.scope, str(height), before, value)).digest()


def of_commitments(statements: Mapping[str, Statement]) -> bytes:
    listed = [as_list(Message(statements[site]))[:6] for site in sorted(statements)]
    return json.dumps(listed, separators=(",", ":")).encode()


def commitments_of(terms: Terms, value: bytes) -> dict[str, bytes]:
    """The commitment of every site in a value for the first agreement: of n - f sites at least, signed by each."""
    found = loads(value)
    require(isinstance(found, list), "commitments: not a list")
    statements = [parse_statement(entry) for entry in found]
    least = len(terms.sites) - terms.faults
    sites = [said.author for said in statements]
    ordered = sites == sorted(set(sites))
    require(ordered and len(sites) >= least, f"commitments: {len(sites)} sites, {least} are needed, each once")
    for said in statements:
        good = said.topic is Topic.COMMITMENT and said.height == COMMITMENTS and said.is_genuine(terms)
        require(good, "commitments: one is not signed by its site", sealing.DENIED)
    return {said.author: said.content for said in statements}


def of_contributions(contributions: Mapping[str, bytes]) -> bytes:
    listed = [[site, contributions[site].hex()] for site in sorted(contributions)]
    return json.dumps(listed, separators=(",", ":")).encode()


def contributions_of(terms: Terms, agreed: Mapping[str, bytes], value: bytes) -> dict[str, bytes]:
    """Contributions of f + 1 sites at least, each opening the commitment that was agreed on."""
    try:
        listed = [(str(site), bytes.fromhex(text)) for site, text in loads(value)]
    except (TypeError, ValueError):
        raise ProtocolError("INVALID_ARGUMENT", "contributions: not a list of site and contribution") from None
    sites, least = [site for site, _ in listed], terms.faults + 1
    ordered = sites == sorted(set(sites))
    require(ordered and len(sites) >= least, f"contributions: {len(sites)} sites, {least} are needed, each once")
    for site, contribution in listed:
        require(opens(terms, agreed, site, contribution), f"contributions: not what {site[:80]!r} committed to")
    return dict(listed)


def opens(terms: Terms, agreed: Mapping[str, bytes], site: str, contribution: bytes) -> bool:
    right = len(contribution) == DIGEST and site in agreed
    return right and agreed[site] == commitment(terms, site, contribution)


@dataclass(frozen=True)
class Outcome:
    """What the sites agreed on. `state` is the digest of both values; who else has the same has the same secret."""

    secret: bytes = field(repr=False)
    state: str
    contributors: tuple[str, ...]


def outcome(terms: Terms, contributions: Mapping[str, bytes], state: bytes) -> Outcome:
    """The agreed secret: HKDF over the opened contributions, for this run, round and agreed state."""
    material = sealing.fields(*(contributions[site] for site in sorted(contributions)))
    secret = keys.derive(material, terms.run, terms.round, state.hex(), "agreed secret")
    return Outcome(secret, state.hex(), tuple(sorted(contributions)))


def check_value(terms: Terms, secret: bytes, round: int) -> bytes:
    """What a site shows with its upload of a round: equal for sites of one roster and secret, and tells neither."""
    return keys.derive(secret, terms.run, round, terms.scope.hex(), "agreement check")
