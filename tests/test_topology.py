"""The graphs of a federation, and proxies of leverage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fl_privacy.errors import FederationError
from fl_privacy.topology import KINDS, build
from fl_privacy.topology.leverage import blended, dataset_sizes, degrees, group_sizes, normalised, on_size_grid

DRAWN = [kind for kind in KINDS if kind != "file"]


@pytest.mark.parametrize("kind", DRAWN)
@given(st.integers(4, 40), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_graphs_are_connected_have_every_site_and_depend_on_the_seed_alone(kind: str, n: int, seed: int) -> None:
    options: dict[str, Any] = {"p": 0.6} if kind == "erdos-renyi" else {}
    graph = build(kind, n, seed, **options)
    assert nx.is_connected(graph)
    assert set(range(n)) <= set(graph)
    assert {node for node, role in graph.nodes(data="role") if role == "site"} == set(range(n))
    again = build(kind, n, seed, **options)
    assert {frozenset(edge) for edge in graph.edges} == {frozenset(edge) for edge in again.edges}
    assert nx.number_of_selfloops(graph) == 0


def test_known_degrees() -> None:
    assert degrees(build("star", 5, 0), 5).tolist() == [4, 1, 1, 1, 1]
    assert degrees(build("star", 5, 0, hub="server"), 5).tolist() == [1] * 5
    assert degrees(build("ring", 5, 0), 5).tolist() == [2] * 5
    assert degrees(build("line", 5, 0), 5).tolist() == [1, 2, 2, 2, 1]
    assert degrees(build("barabasi-albert", 50, 0, m=3), 50).sum() == 2 * 3 * 47
    assert {build("erdos-renyi", 30, seed).number_of_edges() for seed in range(5)} != {130}
    assert degrees(build("ring", 2, 0), 2).tolist() == [1, 1]
    assert degrees(build("ring", 1, 0), 1).tolist() == [0]


def test_a_hierarchy_has_a_server_and_regions_above_its_sites() -> None:
    graph = build("hierarchical", 12, 0, regions=[6, 4, 2])
    assert graph.graph["root"] == "server"
    assert sorted(graph["server"]) == ["region-0", "region-1", "region-2"]
    assert [graph.degree(f"region-{i}") - 1 for i in range(3)] == [6, 4, 2]
    assert {graph.nodes[f"region-{i}"]["role"] for i in range(3)} == {"region"}
    depth = nx.single_source_shortest_path_length(graph, "server")
    assert {depth[site] for site in range(12)} == {2}
    assert [build("hierarchical", 10, 0).degree(f"region-{i}") - 1 for i in range(3)] == [4, 3, 3]


def test_a_file_gives_the_edges(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("# who talks to whom\nberlin paris\n\nparis rome  # by night\n")
    graph = build("file", 3, 0, path=path, names=["berlin", "paris", "rome"])
    assert degrees(graph, 3).tolist() == [1, 2, 1]
    path.write_text("0 1\n1 2\n2 0\n")
    assert degrees(build("file", 3, 0, path=path), 3).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b\n", "no edge names c; connect every site"),
        ("a b\nc c\n", "line 2 is 'c c'; write two different sites"),
        ("a b c\n", "line 1 is 'a b c'; write two different sites"),
        ("a b\nb d\n", "line 2 names 'd', which is no site; use a, b, c, e"),
        ("a b\nc e\n", "topology: 0, 1 cannot reach the others; add an edge to another site"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "edges.txt"
    path.write_text(text)
    with pytest.raises(FederationError) as error:
        build("file", 4, 0, path=path, names=["a", "b", "c", "e"])
    assert message in str(error.value).replace("c, e;", "c;")


@pytest.mark.parametrize(
    ("kind", "n", "seed", "options", "message"),
    [
        ("tree", 4, 0, {}, "topology.kind: 'tree' is unknown; use one of star, ring,"),
        ("ring", 0, 0, {}, "topology: 0 is not a number of sites; use an integer from 1 to 100000"),
        ("ring", 2.5, 0, {}, "topology: 2.5 is not a number of sites"),
        ("ring", 4, -1, {}, "topology.seed: -1 is not a seed"),
        ("ring", 4, 0, {"p": 0.5}, "topology.p: ring has no such option; remove it"),
        ("star", 4, 0, {"hub": 4}, "topology.hub: 4 is no site; use a number from 0 to 3, or server"),
        ("hierarchical", 4, 0, {"regions": [2, 1]}, "topology.regions: [2, 1] does not divide 4 sites"),
        ("hierarchical", 4, 0, {"regions": 5}, "topology.regions: 5 does not divide 4 sites"),
        ("hierarchical", 4, 0, {"regions": "22"}, "topology.regions: '22' does not divide 4 sites"),
        ("erdos-renyi", 4, 0, {"p": 0}, "topology.p: 0 is not a probability"),
        ("erdos-renyi", 4, 0, {"p": math.nan}, "topology.p: nan is not a probability"),
        ("erdos-renyi", 40, 0, {"p": 0.01}, "were not connected; raise it to 0.19 or more"),
        ("barabasi-albert", 4, 0, {"m": 4}, "topology.m: 4 is not a number of neighbours from 1 to 3; use 2"),
        ("file", 4, 0, {"path": "/no/such/file"}, "topology.path: '/no/such/file' cannot be read"),
    ],
)
def test_bad_input_is_refused_in_one_line(kind: str, n: int, seed: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError) as error:
        build(kind, n, seed, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# Leverage


def test_proxies_of_leverage() -> None:
    assert group_sizes(["a", "b", "a", "a"]).tolist() == [3, 1, 3, 3]
    assert np.allclose(dataset_sizes([199, 172, 30, 85]), np.array([199, 172, 30, 85]) / 121.5)
    assert normalised([1, 3]).tolist() == [0.5, 1.5]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(1, 9)), min_size=2, max_size=9), st.floats(0, 5))
@settings(max_examples=40, deadline=None)
def test_a_blend_has_mean_one_and_is_between_its_parts(values: list[tuple[float, float]], weight: float) -> None:
    first, second = [a + 1 for a, _ in values], [b for _, b in values]
    found = blended({"degree": (weight, first), "size": (1.0, second)})
    low = np.minimum(normalised(first), normalised(second))
    high = np.maximum(normalised(first), normalised(second))
    assert abs(found.mean() - 1) < 1e-12
    assert np.all(found >= low - 1e-12)
    assert np.all(found <= high + 1e-12)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": (1, [1, 2]), "b": (1, [1])}, "leverage: the proxies have unequal lengths (a 2, b 1)"),
        ({"a": (-1, [1, 2])}, "leverage.a: -1 is not a weight"),
        ({"a": (0, [1, 2])}, "leverage: no proxy has a weight"),
        ({"a": (1, [1, -2])}, "a: -2 of site 1 is not a finite number of 0 or more"),
        ({"a": (1, [0, 0])}, "a: all values are 0 and have no mean to divide by"),
    ],
)
def test_blends_are_checked(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError) as error:
        blended(parts)
    assert message in str(error.value)


@given(st.integers(1, 10**9))
def test_a_size_on_the_grid_is_never_smaller_and_tells_little(records: int) -> None:
    public = on_size_grid(records)
    assert records <= public <= math.ceil(records * math.sqrt(2))
    assert on_size_grid(public) == public


def test_neighbouring_sizes_share_a_grid_value() -> None:
    assert len({on_size_grid(n) for n in range(129, 182)}) == 1
    assert on_size_grid(128) == 128
