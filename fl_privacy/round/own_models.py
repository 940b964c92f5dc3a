"""Sites that start a round from different models: one digest stands for all of them in the terms of an attempt.

Each site can check that its own model is among them, at its own place; a place says nothing of the other models.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping

from fl_privacy.crypto import keys, merkle
from fl_privacy.errors import ProtocolError


class OwnModels:
    """The digests of the models by site, salted one by one and sorted."""

    def __init__(self, digests: Mapping[str, bytes], salt: bytes) -> None:
        keys.check_key(salt)
        salts = {site: hmac.digest(salt, site.encode(), "sha256") for site in digests}
        self._salts = salts
        self._leaf = {site: _leaf(salts[site], site, digest) for site, digest in digests.items()}
        self._leaves = sorted(self._leaf.values())

    @property
    def root(self) -> bytes:
        return merkle.root(self._leaves)

    def place(self, site: str) -> str:
        """What the site needs to find its model."""
        index = self._leaves.index(self._leaf[site])
        return json.dumps([self._salts[site].hex(), index, [one.hex() for one in merkle.path(self._leaves, index)]])


def root_of(place: str, site: str, digest: bytes, count: int) -> bytes:
    """The root that a place, for which nobody vouches, leads to from the model of one of `count` sites."""
    try:
        salt, index, path = json.loads(place)
        leaf = _leaf(bytes.fromhex(salt), site, digest)
        root = merkle.climb(leaf, index, count, [bytes.fromhex(one) for one in path])
    except (ValueError, TypeError, RecursionError):
        root = None
    if root is None:
        raise ProtocolError("INVALID_ARGUMENT", "place: not one of a model among those of all sites")
    return root


def _leaf(salt: bytes, site: str, digest: bytes) -> bytes:
    name = site.encode()
    return merkle.leaf(salt + len(name).to_bytes(4, "big") + name + digest)
