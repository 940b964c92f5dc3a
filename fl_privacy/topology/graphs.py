"""The graph of a federation: sites 0 to n - 1, and the parties between them that are no sites.

networkx is imported where it is used: reading a config does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_privacy.errors import FederationError

TRIES = 100
MOST_SITES = 100_000
NAMED = 5  # sites that a message names
SERVER = "server"
Graph = Any  # networkx has no types


def build(kind: str, n: int, seed: int, **options: Any) -> Graph:
    """A connected networkx graph of n sites. The same arguments give the same graph.

    Every node has a `role` (site, region or server); `graph.graph["root"]` is the node at the top, None without one.

    >>> sorted(degree for _, degree in build("star", 4, seed=0).degree())
    [1, 1, 1, 3]
    """
    known = KINDS.get(kind)
    if known is None:
        raise FederationError(f"topology.kind: {kind!r} is unknown; use one of {', '.join(KINDS)}")
    if not _integer(n) or not 1 <= n <= MOST_SITES:
        raise FederationError(f"topology: {n!r} is not a number of sites; use an integer from 1 to {MOST_SITES}")
    if not _integer(seed) or seed < 0:
        raise FederationError(f"topology.seed: {seed!r} is not a seed; use an integer of 0 or more")
    make, accepted = known
    for name in sorted(set(options) - set(accepted)):
        fix = f"use {', '.join(accepted)}" if accepted else "remove it"
        raise FederationError(f"topology.{name}: {kind} has no such option; {fix}")
    graph = make(n, seed, **options)
    _check(graph, n)
    graph.graph.update(kind=kind, seed=seed)
    graph.graph.setdefault("root", None)
    for node in graph:
        graph.nodes[node].setdefault("role", "site")
    return graph


def star(n: int, seed: int, hub: str | int = 0) -> Graph:
    """All connected to one: a site (as in the paper, where that one has degree n - 1), or `hub: server`, which is none.

    Around a server, all sites have the same degree.
    """
    graph = _sites(n)
    if hub == SERVER:
        graph.add_node(SERVER, role="server")
    elif not _integer(hub) or not 0 <= int(hub) < n:
        raise FederationError(f"topology.hub: {hub!r} is no site; use a number from 0 to {n - 1}, or server")
    graph.add_edges_from((hub, site) for site in range(n) if site != hub)
    graph.graph["root"] = hub
    return graph


def ring(n: int, seed: int) -> Graph:
    """Each site with the next, and the last with the first."""
    graph = line(n, seed)
    if n > 2:
        graph.add_edge(n - 1, 0)
    return graph


def line(n: int, seed: int) -> Graph:
    """Each site with the next."""
    graph = _sites(n)
    graph.add_edges_from((site, site + 1) for site in range(n - 1))
    return graph


def hierarchical(n: int, seed: int, regions: int | Sequence[int] = 3) -> Graph:
    """A server, regional aggregators, and their sites: so many regions of nearly equal size, or the size of each."""
    sizes = region_sizes(n, regions)
    graph = _sites(n)
    graph.add_node(SERVER, role="server")
    graph.graph["root"] = SERVER
    first = 0
    for number, size in enumerate(sizes):
        region = f"region-{number}"
        graph.add_node(region, role="region")
        graph.add_edge(SERVER, region)
        graph.add_edges_from((region, site) for site in range(first, first + size))
        first += size
    return graph


def erdos_renyi(n: int, seed: int, p: float = 0.3) -> Graph:
    """Each pair is connected with probability p; drawn again until the graph is connected."""
    import networkx as nx

    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 < p <= 1:
        raise FederationError(f"topology.p: {p!r} is not a probability; use a number above 0 and at most 1")
    rng = np.random.default_rng(seed)
    for _ in range(TRIES):
        graph = nx.fast_gnp_random_graph(n, p, seed=int(rng.integers(2**31)))
        if nx.is_connected(graph):
            return graph
    fix = f"raise it to {min(1.0, math.ceil(200 * math.log(max(n, 2)) / n) / 100):g} or more"
    raise FederationError(f"topology.p: {TRIES} graphs of {n} sites with {p:g} were not connected; {fix}")


def barabasi_albert(n: int, seed: int, m: int = 2) -> Graph:
    """Each new site connects to m others, preferably to well connected ones."""
    import networkx as nx

    if not _integer(m) or not 1 <= m < n:
        raise FederationError(f"topology.m: {m!r} is not a number of neighbours from 1 to {n - 1}; use 2")
    return nx.barabasi_albert_graph(n, m, seed=int(np.random.default_rng(seed).integers(2**31)))


def from_file(n: int, seed: int, path: str | Path = "", names: Sequence[str] = (), edges: str | None = None) -> Graph:
    """The edges of a text file, or its text: two sites per line; # starts a comment. Sites are `names`, or numbers."""
    try:
        text = Path(path).read_text(encoding="utf-8") if edges is None else edges
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise FederationError(f"topology.path: {str(path)!r} cannot be read ({error}); give a text file") from None
    return from_edges(text, names or [str(site) for site in range(n)], str(path) if edges is None else "topology.file")


def from_edges(text: str, names: Sequence[str], source: str) -> Graph:
    """The graph that a text lists edge by edge."""
    number = {name: i for i, name in enumerate(names)}
    graph, seen = _sites(len(names)), set()
    for at, raw in enumerate(text.splitlines(), start=1):
        ends = raw.partition("#")[0].split()
        if not ends:
            continue
        if len(ends) != 2 or ends[0] == ends[1]:
            raise FederationError(f"{source}: line {at} is {raw.strip()[:80]!r}; write two different sites")
        for end in ends:
            if end not in number:
                raise FederationError(f"{source}: line {at} names {end[:80]!r}, which is no site; use {some(names)}")
        graph.add_edge(*(number[end] for end in ends))
        seen.update(ends)
    if missing := [name for name in names if name not in seen and len(names) > 1]:
        raise FederationError(f"{source}: no edge names {some(missing)}; connect every site")
    return graph


def region_sizes(n: int, regions: int | Sequence[int]) -> list[int]:
    """The number of sites in each region."""
    if _integer(regions) and 1 <= int(regions) <= n:  # type: ignore[arg-type]
        each, more = divmod(n, int(regions))  # type: ignore[arg-type]
        return [each + (i < more) for i in range(int(regions))]  # type: ignore[arg-type]
    sizes = list(regions) if isinstance(regions, Sequence) and not isinstance(regions, str) else []
    if not sizes or not all(_integer(size) and size >= 1 for size in sizes) or sum(sizes) != n:
        fix = f"use a number from 1 to {n}, or a list of sizes that add up to {n}"
        raise FederationError(f"topology.regions: {regions!r} does not divide {n} sites; {fix}")
    return sizes


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _check(graph: Graph, n: int) -> None:
    """Raise unless every site is there and the graph is connected."""
    import networkx as nx

    if missing := [str(site) for site in range(n) if site not in graph]:
        raise FederationError(f"topology: site {some(missing)} is not in the graph; connect every site")
    pieces = list(nx.connected_components(graph))
    if len(pieces) > 1:
        apart = sorted(str(node) for node in min(pieces, key=len))
        raise FederationError(f"topology: {some(apart)} cannot reach the others; add an edge to another site")


def _sites(n: int) -> Graph:
    import networkx as nx

    return nx.empty_graph(n)


def _integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


KINDS: dict[str, tuple[Callable[..., Graph], tuple[str, ...]]] = {
    "star": (star, ("hub",)),
    "ring": (ring, ()),
    "line": (line, ()),
    "hierarchical": (hierarchical, ("regions",)),
    "erdos-renyi": (erdos_renyi, ("p",)),
    "barabasi-albert": (barabasi_albert, ("m",)),
    "file": (from_file, ("path", "names", "edges")),
}
