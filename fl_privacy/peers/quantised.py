"""Q-DPSGD-1 (Ding et al. 2021): private local steps, then gossip with neighbours in quantised models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fl_privacy.peers.exchange import Exchange, Matrix, Message
from fl_privacy.peers.graph import Neighbours
from fl_privacy.steps.compress.baseline import uniforms
from fl_privacy.steps.compress.qsgd import levelled
from fl_privacy.vector import Vector


def quantised(model: Vector, tensors: Iterable[slice], levels: int, key: bytes) -> Vector:
    """Every entry as a sign and one of `levels` + 1 even levels up to the largest entry of its tensor. Unbiased.

    An entry is rounded up with the probability that makes it so; `key` is single-use.
    """
    draws, exact = uniforms(model.size, key), model.astype(np.float64)
    for part in tensors:
        exact[part] = levelled(exact[part], np.abs(exact[part]).max(initial=0.0), levels, draws[part])
    return exact.astype(np.float32)


def exchange(trained: Matrix, sent: Sequence[Vector], graph: Neighbours, mixing: float) -> Exchange:
    """x_i <- y_i + mixing sum_j w_ij (Q(y_j) - y_i), with y the trained and Q(y) the sent models.

    The weights are Metropolis's, w_ij = 1/(1 + max(deg_i, deg_j)): doubly stochastic, so that the mean over all peers
    is that of the trained models, but for the quantisation, which is unbiased.
    """
    new, messages = trained.astype(np.float64), []
    for node, neighbours in enumerate(graph):
        for other in neighbours:
            weight = mixing / (1 + max(len(neighbours), len(graph[other])))
            new[node] += weight * (sent[other] - trained[node].astype(np.float64))
            messages.append(Message(other, node, sent[other]))
    return Exchange(new.astype(np.float32), messages)
