"""Ako (Watcharapichat et al. 2016): partial gradient exchange. Every peer sends another partition each round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_privacy.peers.exchange import Arrays, Exchange, Ints, Matrix, Message

RECENT = "recent"


def exchange(models: Matrix, updates: Matrix, partitions: Sequence[Ints], round: int, kept: Arrays) -> Exchange:
    """A peer adds 1/n of its own update, and of the accumulated partition that it gets from every other peer.

    A recipient gets the p partitions of a sender in turn, each with all updates since its last turn.
    So every update reaches every peer exactly once, up to p - 1 rounds late.
    """
    n, p = len(models), len(partitions)
    recent = np.concatenate([kept.get(RECENT, np.empty((0, *updates.shape), np.float32)), updates[None]])
    unsent = recent.sum(axis=0, dtype=np.float64)  # of the last p rounds
    received, messages = updates.astype(np.float64), []
    for sender in range(n):
        for recipient in (peer for peer in range(n) if peer != sender):
            where = partitions[(round + recipient - sender) % p]
            received[recipient, where] += unsent[sender, where]
            messages.append(Message(sender, recipient, unsent[sender, where].astype(np.float32), where))
    new = (models + received / n).astype(np.float32)
    return Exchange(new, messages, {RECENT: recent[max(0, len(recent) - p + 1) :]} if p > 1 else {})
