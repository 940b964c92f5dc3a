"""A Merkle tree: one digest commits to many leaves, and a short path shows that a leaf is among them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

SIZE = 32  # bytes of a digest
_LEAF, _NODE = b"\0", b"\1"  # a leaf never passes for an inner node


def leaf(data: bytes) -> bytes:
    """The digest of one leaf's content."""
    return hashlib.sha256(_LEAF + data).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The digest of all leaves, in this order."""
    return _levels(leaves)[-1][0]


def path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The siblings on the way from a leaf to the root."""
    found = []
    for level in _levels(leaves)[:-1]:
        sibling = index ^ 1
        if sibling < len(level):
            found.append(level[sibling])
        index //= 2
    return found


def climb(leaf: bytes, index: int, count: int, path: Sequence[bytes]) -> bytes | None:
    """The root that this path leads to from leaf `index` of `count`; None if the path has another length."""
    if not 0 <= index < count:
        return None
    siblings, node = iter(path), leaf
    while count > 1:
        if index ^ 1 < count:
            sibling = next(siblings, None)
            if sibling is None:
                return None
            node = _node(sibling, node) if index % 2 else _node(node, sibling)
        index, count = index // 2, (count + 1) // 2
    return node if next(siblings, None) is None else None


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """From the leaves to the root; a node without a sibling moves up unchanged."""
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        below = levels[-1]
        pairs = [below[i : i + 2] for i in range(0, len(below), 2)]
        levels.append([_node(*pair) if len(pair) == 2 else pair[0] for pair in pairs])
    return levels


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()
