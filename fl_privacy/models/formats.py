"""Model files by suffix: safetensors and PyTorch state dicts are written and read, ONNX is written."""

from __future__ import annotations

import io
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from fl_privacy.errors import FederationError
from fl_privacy.files import write_public
from fl_privacy.models.kept import FACTS
from fl_privacy.vector import Layout, Vector, unflatten

Shape = tuple[int, ...]
State = Mapping[str, torch.Tensor]


def write(path: Path, model: nn.Module | State, shape: Shape | None, facts: str) -> None:
    """Write a model in the format of the file's suffix, as a whole, with `facts` (JSON) inside.

    Only the formats in TRACED need a module, and `shape`, that of one record; the tensors are enough for the others.
    """
    make = WRITERS.get(path.suffix)
    if make is None:
        raise FederationError(f"to: {path.name!r} has no suffix of a model file; use one of {', '.join(WRITERS)}")
    try:
        write_public(path, make(model, shape, facts))
    except OSError as error:
        raise FederationError(f"to {path}: {error.strerror or error}; use another file") from None


def tensors(model: Vector, layout: Layout) -> State:
    """The named tensors of a flat model."""
    return {name: torch.from_numpy(array) for name, array in unflatten(model, layout).items()}


def _state(model: nn.Module | State) -> dict[str, torch.Tensor]:
    """Copies, because safetensors refuses tensors that share memory (tied weights)."""
    state: State = model.state_dict() if isinstance(model, nn.Module) else model
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def _safetensors(model: nn.Module | State, shape: Shape | None, facts: str) -> bytes:
    return bytes(save(_state(model), {"format": "pt", FACTS: facts}))


def _torch(model: nn.Module | State, shape: Shape | None, facts: str) -> bytes:
    """A plain state dict. The file is a zip archive, in which the facts are one more file that torch ignores."""
    made = io.BytesIO()
    torch.save(_state(model), made)
    with zipfile.ZipFile(made, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/{FACTS}.json", facts)
    return made.getvalue()


def _onnx(model: nn.Module | State, shape: Shape | None, facts: str) -> bytes:
    """One file for batches of any size, with weights inside."""
    assert isinstance(model, nn.Module)
    model.eval()
    if shape is None:
        fix = "add --shape, such as --shape 10 for ten features"
        raise FederationError(f"to: ONNX needs the shape of one record, which this task does not state; {fix}")
    import onnx

    try:
        records = torch.zeros(2, *shape)
        model(records)
    except Exception as error:  # whatever a model of any kind raises
        raise FederationError(f"shape: the model takes no records of shape {shape} ({_reason(error)})") from None
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"]}
    with _quiet():
        try:
            program = torch.onnx.export(model, (records,), dynamic_shapes=({0: "batch"},), verbose=False, **names)
        except Exception as error:  # whatever tracing it raises
            raise FederationError(f"to: torch cannot export this model to ONNX ({_reason(error)}); use .pt") from None
    assert program is not None  # torch returns one unless it is the old exporter
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {FACTS: facts})
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _reason(error: BaseException) -> str:
    """The first line of the error that caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "".join(c for c in line if c.isprintable())[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns about its own code and about packages that no model here needs."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what goes wrong is in the exception
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


TRACED = (".onnx",)
WRITERS: dict[str, Callable[[nn.Module | State, Shape | None, str], bytes]] = {
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".onnx": _onnx,
}


def read(path: Path) -> State:
    """The named tensors of a safetensors file or of a PyTorch state dict; nothing in it is executed."""
    load = READERS.get(path.suffix)
    if load is None:
        raise FederationError(f"{path}: has no suffix of a readable model; use one of {', '.join(READERS)}")
    try:
        state = load(path)
    except OSError as error:
        raise FederationError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # torch and safetensors document none for a file that is not theirs
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise FederationError(f"{path}: not a {path.suffix} file of tensors ({reason})") from None
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise FederationError(f"{path}: is not a state dict; save model.state_dict()")
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise FederationError(f"{path}: {name[:60]!r} is no dense tensor; save it as one")
    return state


def _load_torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise FederationError("it is compressed, and may unpack to any size")  # torch.save never does that
    return torch.load(path, map_location="cpu", weights_only=True)


READERS: dict[str, Callable[[Path], Any]] = {".safetensors": load_file, ".pt": _load_torch}
