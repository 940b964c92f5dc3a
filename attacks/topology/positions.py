"""What everybody knows of a site without any update: its place in the graph, and its organisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_privacy.config import Federation

Array = NDArray[np.float64]
MOST_EXACT = 500  # nodes, above which betweenness is estimated from as many of them


def structural(federation: Federation) -> Array:
    """Degree, distance to the root (0 without one) and betweenness centrality of every site (Algorithm 1, line 2).

    Without a `topology`, sites stand around a server: all have the same place.
    """
    import networkx as nx

    count = len(federation.sites)
    if federation.topology is None:
        return np.tile([1.0, 1.0, 0.0], (count, 1))
    graph = federation.topology.graph(federation)
    root = graph.graph["root"]
    depth = {} if root is None else nx.single_source_shortest_path_length(graph, root)
    few = None if len(graph) <= MOST_EXACT else MOST_EXACT
    centrality = nx.betweenness_centrality(graph, k=few, seed=federation.seed)
    return np.array([[graph.degree(i), depth.get(i, 0), centrality[i]] for i in range(count)], dtype=np.float64)


def organisational(federation: Federation) -> Array:
    """One-hot labels; a site without an organisation is its own."""
    names = [site.organisation or site.name for site in federation.sites]
    order = list(dict.fromkeys(names))
    return np.eye(len(order))[[order.index(name) for name in names]]


def neighbours(federation: Federation) -> list[NDArray[np.int64]]:
    """The sites that are next to each site in the graph, or on the other side of the same party between them."""
    count = len(federation.sites)
    if federation.topology is None:
        return [np.delete(np.arange(count), i) for i in range(count)]
    graph, sites, found = federation.topology.graph(federation), set(range(count)), []
    for i in sites:
        beside = set(graph[i])
        beyond = {k for party in beside - sites for k in graph[party]}
        found.append(np.array(sorted((beside | beyond) & sites - {i}), dtype=np.int64))
    return found
