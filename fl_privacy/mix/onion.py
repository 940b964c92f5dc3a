"""Onions: one message for a chain of mixes and an innermost layer for the server (Algorithm 8, without its proofs).

Every layer of every onion has a fresh X25519 key: a session key would link the bits of one site. A layer is that key,
and what ChaCha20-Poly1305 makes of the next layer under the HKDF of the exchange, bound to federation, run, round,
attempt and mix: an onion for another mix, round or run does not open. All onions of a batch have one size, which tells
how far they are and nothing else. A mix drops repeated onions, and gives its batch on in a random order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fl_privacy.crypto import sealing
from fl_privacy.crypto.stream import Words
from fl_privacy.errors import FederationError, ProtocolError, require

LAYER = sealing.POINT + sealing.TAG  # bytes that a layer adds
SERVER = "server"
DOMAIN = "fl-privacy onion 1"
DRAWN = 1024  # keys drawn at a time


class Place(NamedTuple):
    """What an onion is bound to."""

    federation: str
    run: str
    round: int
    attempt: str

    def at(self, party: str) -> bytes:
        return sealing.fields(DOMAIN, self.federation, self.run, str(self.round), self.attempt, party)


class Hop(NamedTuple):
    """A mix, or at the end the server: its name, and its key for this run."""

    name: str
    key: X25519PublicKey


def public(point: bytes, whose: str) -> X25519PublicKey:
    """The key that somebody gave for a layer; of a few points anybody knows what every exchange gives."""
    try:
        key = X25519PublicKey.from_public_bytes(point)
        X25519PrivateKey.from_private_bytes(bytes(32)).exchange(key)
        return key
    except ValueError:
        raise ProtocolError("INVALID_ARGUMENT", f"{whose}: gave no key for its layer") from None


def keys_digest(hops: Sequence[Hop]) -> bytes:
    """What stands for the keys that a site's onions are made for: all sites must have the same."""
    listed = [part for hop in hops for part in (hop.name.encode(), hop.key.public_bytes_raw())]
    return hashlib.sha256(sealing.fields(DOMAIN, "keys", *listed)).digest()


def size(content: int, hops: int) -> int:
    """Bytes of an onion that this many parties have still to open."""
    return content + LAYER * hops


def layers(
    content: bytes, hops: Sequence[Hop], place: Place, fresh: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate
) -> list[bytes]:
    """An onion that the hops open in this order, as each of them gets it; at the end the content.

    `fresh` gives a key for every layer.
    """
    if not hops or hops[-1].name != SERVER:
        raise FederationError("onion: the innermost layer is the server's; name it last")
    found = [content]
    for hop in reversed(hops):
        once = fresh()
        point, bound = once.public_key().public_bytes_raw(), place.at(hop.name)
        found.append(point + sealing.encrypt(_key(once.exchange(hop.key), bound + point), found[-1], bound))
    return found[::-1]


def wrapped(
    content: bytes, hops: Sequence[Hop], place: Place, fresh: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate
) -> bytes:
    """The onion as the first hop gets it."""
    return layers(content, hops, place, fresh)[0]


def repeatable(key: bytes) -> Callable[[], X25519PrivateKey]:
    """Fresh keys that a single-use key stands for: who has to send its onions again sends the same ones."""
    words = Words(key)

    def drawn() -> Iterator[X25519PrivateKey]:
        while True:
            block = words.take(DRAWN * sealing.POINT // 8).tobytes()
            for start in range(0, len(block), sealing.POINT):
                yield X25519PrivateKey.from_private_bytes(block[start : start + sealing.POINT])

    return drawn().__next__


def opened(onion: bytes, own: X25519PrivateKey, name: str, place: Place) -> bytes:
    """The next layer; refuses an onion that was made for another party, attempt, round or run."""
    require(len(onion) >= LAYER, f"onion: {len(onion)} bytes are too few")
    point, bound = onion[: sealing.POINT], place.at(name)
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(point))
    except ValueError:
        raise ProtocolError("INVALID_ARGUMENT", "onion: not an X25519 key") from None
    return sealing.decrypt(_key(shared, bound + point), onion[sealing.POINT :], bound)


def passed_on(
    batch: Sequence[bytes], own: X25519PrivateKey, name: str, place: Place, *, each: int, least: int, order: bytes
) -> list[bytes]:
    """A mix's whole batch, one layer further and in a random order that `order`, a single-use key, gives.

    `each` is the size of an onion here, and `least` the fewest that may be mixed. What does not open counts for
    nothing: a batch that is padded with such onions does not reach the threshold.
    """
    good = all(len(onion) == each for onion in batch)
    require(good, f"onions: not all of {each} bytes")
    require(len(set(batch)) == len(batch), "onions: the batch has one of them twice", "ALREADY_EXISTS")
    found = [opened(onion, own, name, place) for onion in batch]
    require(len(found) >= least, f"onions: {len(found)} in a batch, {least} are needed", "FAILED_PRECONDITION")
    return [found[index] for index in permutation(len(found), order)]


def permutation(count: int, key: bytes) -> list[int]:
    """A uniform order: ranks of 64-bit keys; equal keys, of probability below count^2 / 2^65, are drawn again."""
    stream = Words(key)
    while True:
        words = stream.take(count + count % 2)[:count]
        order = np.argsort(words, kind="stable")
        if len(np.unique(words)) == count:
            return [int(index) for index in order]


class Rates(NamedTuple):
    """Layers per second of CPU time on this machine."""

    made: float
    opened: float


def rates(count: int = 60) -> Rates:
    """Measured, in some hundredths of a second."""
    keys = [X25519PrivateKey.generate() for _ in range(4)]
    hops = [Hop(name, key.public_key()) for name, key in zip(("a", "b", "c", SERVER), keys, strict=True)]
    place = Place("rates", "run", 1, "attempt")
    began = time.thread_time()
    made = [wrapped(bytes(8), hops, place) for _ in range(count)]
    middle = time.thread_time()
    for hop, key in zip(hops, keys, strict=True):
        made = [opened(one, key, hop.name, place) for one in made]
    layers = count * len(hops)
    return Rates(layers / (middle - began), layers / (time.thread_time() - middle))


class Cost(NamedTuple):
    """Of one round in which every bit of every residue is an onion of its own; seconds are CPU time."""

    onions: int  # of all sites
    bytes_per_site: int
    seconds_per_site: float
    seconds_per_mix: float  # and of the server, which opens the innermost layer


def cost(each: int, sites: int, mixes: int, rates: Rates, content: int = 8) -> Cost:
    """Of `each` onions per site."""
    seconds = each * (mixes + 1) / rates.made, each * sites / rates.opened
    return Cost(each * sites, each * size(content, mixes + 1), *seconds)


def decoys(columns: int, share: float = 1e-3, probability: float = 0.99) -> int:
    """Dummy columns so that altering this share of all columns hits one with this probability, at random places.

    Each altered column is a dummy with probability k / (d + k); a s of the d + k columns miss all k with probability
    at most (1 - s)^k, so k = ln(1 - p) / ln(1 - s), whatever d is.
    """
    if not (columns > 0 and 0 < share < 1 and 0 < probability < 1):
        raise FederationError(f"decoys: {share:g} of {columns} columns with probability {probability:g} is no demand")
    return int(np.ceil(np.log1p(-probability) / np.log1p(-share)))


def _key(shared: bytes, bound: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=bound).derive(shared)
