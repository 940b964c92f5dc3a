"""Convert a model to one flat float32 vector with its layout, and back."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_privacy.errors import FederationError

if TYPE_CHECKING:
    import torch

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Entry:
    """One tensor of the model: its name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Which coordinates of the vector belong to which tensor, in order."""

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if len({entry.name for entry in self.entries}) != len(self.entries):
            raise FederationError("layout: two tensors have the same name; give every tensor its own")
        if any(length < 0 for entry in self.entries for length in entry.shape):
            raise FederationError("layout: a shape has a negative length; use 0 or more")

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names and shapes; two parties compare it before they exchange vectors."""
        listing = json.dumps([[e.name, list(e.shape)] for e in self.entries], separators=(",", ":"))
        return hashlib.sha256(listing.encode()).hexdigest()

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of every tensor, by name."""
        found, start = {}, 0
        for entry in self.entries:
            found[entry.name] = slice(start, start + entry.size)
            start += entry.size
        return found

    @cached_property
    def layers(self) -> tuple[slice, ...]:
        """One slice per layer: adjacent tensors of one module (`fc1.weight`, `fc1.bias`) belong together."""
        spans: list[tuple[str, int, int]] = []
        for name, part in self.slices.items():
            module = name.rpartition(".")[0]
            if spans and spans[-1][0] == module:
                spans[-1] = (module, spans[-1][1], part.stop)
            else:
                spans.append((module, part.start, part.stop))
        return tuple(slice(start, stop) for _, start, stop in spans)

    def to_json(self) -> list[list[Any]]:
        return [[e.name, list(e.shape)] for e in self.entries]

    @classmethod
    def from_json(cls, listing: list[list[Any]]) -> Layout:
        return cls(tuple(Entry(str(name), tuple(int(n) for n in shape)) for name, shape in listing))


def layout_of(state: Mapping[str, torch.Tensor]) -> Layout:
    """The layout of the vector that `flatten` would make; takes no memory, whatever shapes the tensors claim."""
    kept = (item for item in state.items() if item[1].is_floating_point())
    return Layout(tuple(Entry(name, tuple(tensor.shape)) for name, tensor in kept))


def flatten(model: torch.nn.Module | Mapping[str, Any]) -> tuple[Vector, Layout]:
    """The model's floating-point parameters and buffers as one float32 vector, in the order of its state dict."""
    state: Mapping[str, Any] = model if isinstance(model, Mapping) else model.state_dict()
    entries, parts = [], []
    for name, tensor in state.items():
        array = _array(tensor)
        if not np.issubdtype(array.dtype, np.floating):
            continue
        entries.append(Entry(name, tuple(array.shape)))
        parts.append(np.ascontiguousarray(array, dtype=np.float32).reshape(-1))
    vector = np.concatenate(parts) if parts else np.empty(0, np.float32)
    return vector, Layout(tuple(entries))


def _array(tensor: Any) -> NDArray[Any]:
    """A tensor or array as an array. NumPy has no bfloat16, so torch converts it to float32."""
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).detach().cpu())


def unflatten(vector: Vector, layout: Layout) -> dict[str, NDArray[np.float32]]:
    """The named tensors of `vector`, as views into it: the inverse of `flatten`."""
    if vector.shape != (layout.size,):
        raise FederationError(f"vector: shape {vector.shape} does not fit a layout of {layout.size} parameters")
    shapes = {entry.name: entry.shape for entry in layout.entries}
    return {name: vector[part].reshape(shapes[name]) for name, part in layout.slices.items()}


def load(model: torch.nn.Module, vector: Vector, layout: Layout) -> None:
    """Copy `vector` into the model, in place."""
    import torch

    state = model.state_dict()
    for entry in layout.entries:
        if entry.name not in state or tuple(state[entry.name].shape) != entry.shape:
            raise FederationError(f"layout: the model has no tensor {entry.name!r} of shape {entry.shape}; rebuild it")
    with torch.no_grad():
        for name, array in unflatten(vector, layout).items():
            state[name].copy_(torch.from_numpy(np.array(array, copy=True)))
