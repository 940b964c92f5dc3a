"""A model as one vector: nothing is lost, reordered or silently misplaced."""

from __future__ import annotations

import string

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fl_privacy.errors import FederationError
from fl_privacy.vector import Entry, Layout, flatten, load, unflatten

names = st.lists(st.text(string.ascii_lowercase + ".", min_size=1, max_size=8), unique=True, max_size=6)
tensors = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements=st.floats(-1e6, 1e6, width=32),
)


@st.composite
def states(draw: st.DrawFn) -> dict[str, NDArray[np.float32]]:
    return {name: draw(tensors) for name in draw(names)}


@given(states())
def test_unflatten_inverts_flatten(state: dict[str, NDArray[np.float32]]) -> None:
    vector, layout = flatten(state)
    back = unflatten(vector, layout)
    assert vector.dtype == np.float32
    assert list(back) == list(state)
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].shape == array.shape


@given(states())
def test_slices_and_layers_are_disjoint_and_complete(state: dict[str, NDArray[np.float32]]) -> None:
    _, layout = flatten(state)
    for parts in (layout.slices.values(), layout.layers):
        covered = [i for part in parts for i in range(part.start, part.stop)]
        assert covered == list(range(layout.size))


@given(states())
def test_a_layout_survives_json_with_its_digest(state: dict[str, NDArray[np.float32]]) -> None:
    _, layout = flatten(state)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest == layout.digest


def test_the_digest_distinguishes_layouts() -> None:
    layouts = [Layout((Entry("a", shape),)) for shape in ((2, 3), (3, 2), (6,))] + [Layout((Entry("b", (6,)),))]
    assert len({layout.digest for layout in layouts}) == len(layouts)


def test_flatten_copies_and_unflatten_returns_views() -> None:
    state = {"w": np.zeros(3, np.float32)}
    vector, layout = flatten(state)
    state["w"][0] = 1
    assert vector[0] == 0
    unflatten(vector, layout)["w"][1] = 2
    assert vector[1] == 2


def test_a_model_is_restored_and_integers_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    vector, layout = flatten(model)
    assert layout.size == 3 * 2 + 2 + 4 * 2
    assert [part.stop - part.start for part in layout.layers] == [8, 8]
    load(model, vector * 2 + 1, layout)
    np.testing.assert_array_equal(flatten(model)[0], vector * 2 + 1)
    assert int(model.state_dict()["1.num_batches_tracked"]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_float32(dtype: torch.dtype) -> None:
    vector, layout = flatten({"w": torch.tensor([0.5, -2.0], dtype=dtype)})
    np.testing.assert_array_equal(vector, np.array([0.5, -2.0], np.float32))
    assert layout.entries == (Entry("w", (2,)),)


def test_an_empty_model_is_an_empty_vector() -> None:
    vector, layout = flatten({})
    assert vector.shape == (0,)
    assert (layout.size, layout.layers, unflatten(vector, layout)) == (0, (), {})


def test_sizes_do_not_overflow() -> None:
    assert Entry("w", (2**40, 2**40)).size == 2**80


@pytest.mark.parametrize("entries", [[["a", [1]], ["a", [2]]], [["a", [-1]]]])
def test_a_broken_layout_is_refused(entries: list[list[object]]) -> None:
    with pytest.raises(FederationError, match="layout: "):
        Layout.from_json(entries)


def test_a_vector_of_another_size_is_refused() -> None:
    _, layout = flatten({"w": np.zeros(3, np.float32)})
    with pytest.raises(FederationError, match="does not fit a layout of 3"):
        unflatten(np.zeros(4, np.float32), layout)


@pytest.mark.parametrize("entry", [Entry("bias", (1,)), Entry("weights", (2,))])
def test_a_layout_of_another_model_is_refused_and_not_broadcast(entry: Entry) -> None:
    with pytest.raises(FederationError, match="layout: the model has no tensor"):
        load(torch.nn.Linear(3, 2), np.zeros(entry.size, np.float32), Layout((entry,)))
