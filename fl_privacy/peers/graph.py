"""Who sends to whom: random regular graphs from a public seed."""

from __future__ import annotations

import numpy as np

from fl_privacy.errors import FederationError

TRIES = 100
Neighbours = list[list[int]]  # of every node, ascending


def regular(nodes: int, degree: int, seed: tuple[int, ...], connected: bool = False) -> Neighbours:
    """A random graph in which every node has `degree` neighbours; with `connected`, one in a single piece."""
    import networkx as nx  # reading a config does not need it

    if problem := impossible(nodes, degree):
        raise FederationError(f"degree: {problem}")
    if degree == nodes - 1:
        return [[other for other in range(nodes) if other != node] for node in range(nodes)]
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    for _ in range(TRIES):
        found = nx.random_regular_graph(degree, nodes, seed=int(rng.integers(2**31)))
        if not connected or nx.is_connected(found):
            return [sorted(found[node]) for node in range(nodes)]
    raise FederationError(f"degree: {TRIES} random graphs of {nodes} nodes with {degree} fell apart; raise it")


def impossible(nodes: int, degree: int) -> str:
    """Why no such graph exists; empty if one does."""
    if not 1 <= degree < nodes:
        return f"{degree} is not from 1 to {nodes - 1}, one less than there are nodes"
    return (
        f"{degree} times {nodes} nodes is odd, so no such graph exists; use an even one" if degree * nodes % 2 else ""
    )
