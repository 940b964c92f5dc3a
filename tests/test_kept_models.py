"""The models that a site keeps: what it reads is what it wrote, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file

from fl_privacy.errors import FederationError
from fl_privacy.models import keep, kept, received
from fl_privacy.vector import Entry, Layout, Vector, unflatten
from profiles import examples

LAYOUT = Layout((Entry("z.weight", (3, 2)), Entry("a.bias", (3,)), Entry("scale", ())))
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def vector(layout: Layout = LAYOUT, start: float = 0.5) -> Vector:
    return np.arange(layout.size, dtype=np.float32) + np.float32(start)


@examples(30)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=5), round=st.integers(0, 10**6))
def test_what_is_kept_is_received_in_the_order_of_the_layout(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], round: int
) -> None:
    folder = tmp_path_factory.mktemp("models")
    layout = Layout(tuple(Entry(f"t{-i}", shape) for i, shape in enumerate(shapes)))
    keep(folder, "run-1", "last", round, vector(layout), layout, {"loss": 0.25, "rmse": None})
    found = received(folder, "run-1", "last")
    assert (found.run, found.which, found.round, found.layout) == ("run-1", "last", round, layout)
    assert found.metrics == {"loss": 0.25, "rmse": None}
    np.testing.assert_array_equal(found.model, vector(layout))


def test_the_file_is_a_plain_safetensors_file_and_its_json_says_which(tmp_path: Path) -> None:
    path = keep(tmp_path, "run-1", "best", 7, vector(), LAYOUT, {"loss": 0.5})
    tensors = load_file(path)
    for name, array in unflatten(vector(), LAYOUT).items():
        np.testing.assert_array_equal(tensors[name], array)
    facts = json.loads((tmp_path / "run-1" / "best.json").read_text())
    assert facts["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (facts["run"], facts["round"], facts["layout"]) == ("run-1", 7, LAYOUT.digest)
    assert path.stat().st_mode & 0o077 == 0


def test_a_later_model_replaces_an_earlier_one_and_leaves_no_parts(tmp_path: Path) -> None:
    keep(tmp_path, "a", "last", 1, vector(), LAYOUT)
    keep(tmp_path, "b", "best", 1, vector(), LAYOUT)
    keep(tmp_path, "a", "last", 2, vector(start=9.0), LAYOUT)
    assert received(tmp_path, "a", "last").model[0] == 9.0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["last.json", "last.safetensors"]
    assert kept.runs(tmp_path) == ["b", "a"]


@pytest.mark.parametrize("run", ["../up", "a/b", "", ".hidden", "x" * 200])
def test_a_run_cannot_name_a_path_outside_the_folder(tmp_path: Path, run: str) -> None:
    with pytest.raises(ValueError, match="run"):
        keep(tmp_path / "models", run, "last", 1, vector(), LAYOUT)
    assert list(tmp_path.iterdir()) == []


def test_missing_cut_and_foreign_files_are_one_line(tmp_path: Path) -> None:
    keep(tmp_path, "there", "last", 1, vector(), LAYOUT)
    with pytest.raises(FederationError, match=r"no such file; models are there of there$"):
        received(tmp_path, "gone", "last")
    path = keep(tmp_path, "cut", "last", 1, vector(), LAYOUT)
    whole = path.read_bytes()
    for end in (0, 8, 60, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(FederationError, match="cannot be read"):
            received(tmp_path, "cut", "last")
    save_file({"x": np.zeros(2, np.float32)}, path)
    with pytest.raises(FederationError, match="cannot be read"):
        received(tmp_path, "cut", "last")
    layout = kept.Facts(run="cut", which="last", round=1, layout=LAYOUT.to_json()).model_dump_json()
    other = {entry.name: np.zeros(5, np.float32) for entry in LAYOUT.entries}
    save_file(other, path, {kept.FACTS: layout})
    with pytest.raises(FederationError, match="do not fit its layout"):
        received(tmp_path, "cut", "last")
