"""Shatter (Biswas et al. 2025): virtual nodes send chunks of a site's model, so that nobody learns whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_privacy.peers.exchange import Exchange, Ints, Matrix, Message
from fl_privacy.peers.graph import Neighbours


def exchange(trained: Matrix, chunks: Sequence[Ints], graph: Neighbours) -> Exchange:
    """Virtual node i k + c sends chunk c of site i to its neighbours in `graph`, which pass it on to their sites.

    A site averages every coordinate over its own value and all that it received, as often as it received them. The
    graph may join virtual nodes of one site; what they exchange counts for it, and nobody else sees it.
    """
    k, total, times = len(chunks), trained.astype(np.float64), np.ones(trained.shape, np.int64)
    messages = []
    for node, neighbours in enumerate(graph):
        sender, where = node // k, chunks[node % k]
        for recipient in (neighbour // k for neighbour in neighbours):
            total[recipient, where] += trained[sender, where]
            times[recipient, where] += 1
            if recipient != sender:
                messages.append(Message(sender, recipient, trained[sender, where], where))
    return Exchange((total / times).astype(np.float32), messages)
