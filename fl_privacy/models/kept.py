"""The models that a site received, on its own disk: STATE/models/RUN/last.safetensors and best.safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_privacy.choices import Model
from fl_privacy.errors import FederationError
from fl_privacy.files import replace
from fl_privacy.vector import Layout, Vector, unflatten

Which = Literal["last", "best"]
FACTS = "fl-privacy"  # the key of our facts in the metadata of a safetensors file


class Facts(Model):
    """What the file says about its model."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    which: Which
    round: int = Field(ge=0, le=2**31)
    metrics: dict[str, float | None] = Field(default_factory=dict)
    layout: list[tuple[str, list[int]]]


@dataclass(frozen=True)
class Kept:
    """A received model: the one after `round` of `run`, and how good it was if the site knows."""

    run: str
    which: Which
    round: int
    model: Vector
    layout: Layout
    metrics: Mapping[str, float | None] = field(default_factory=dict)


def keep(
    folder: Path,
    run: str,
    which: Which,
    round: int,
    model: Vector,
    layout: Layout,
    metrics: Mapping[str, float | None] | None = None,
) -> Path:
    """Put a received model in place as a whole, over the previous one; `folder` is the site's STATE/models.

    The file holds all facts itself; the JSON beside it is for people and other programs.
    """
    facts = Facts(run=run, which=which, round=round, metrics=dict(metrics or {}), layout=layout.to_json())
    path = folder / run / f"{which}.safetensors"
    text = facts.model_dump_json()
    data = save(dict(unflatten(np.ascontiguousarray(model, np.float32), layout)), {"format": "pt", FACTS: text})
    beside: dict[str, Any] = {**facts.model_dump(exclude={"layout"}), "parameters": layout.size}
    beside |= {"layout": layout.digest, "sha256": hashlib.sha256(data).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(path, data, mode=0o600)
        replace(path.with_suffix(".json"), json.dumps(beside, indent=1).encode() + b"\n", mode=0o600)
    except OSError as error:
        raise FederationError(f"models {path}: {error.strerror or error}; free some disk space") from None
    return path


def received(folder: Path, run: str, which: Which) -> Kept:
    """A model that `keep` has put in place."""
    path = folder / run / f"{which}.safetensors"
    try:
        with safe_open(path, framework="numpy") as file:
            facts = Facts.model_validate_json((file.metadata() or {}).get(FACTS, ""))
            layout = Layout.from_json([list(entry) for entry in facts.layout])
            tensors = {name: file.get_tensor(name) for name in layout.slices}
    except FileNotFoundError:
        raise FederationError(f"models {path}: no such file; {_there(folder)}") from None
    except (OSError, SafetensorError, ValidationError, FederationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FederationError(f"models {path}: cannot be read ({reason}); use another run's") from None
    shapes = {name: array.shape for name, array in tensors.items() if array.dtype == np.float32}
    if shapes != {entry.name: entry.shape for entry in layout.entries}:
        raise FederationError(f"models {path}: its tensors do not fit its layout; use another run's")
    model = np.concatenate([tensors[name].reshape(-1) for name in layout.slices] or [np.empty(0, np.float32)])
    return Kept(facts.run, facts.which, facts.round, model, layout, facts.metrics)


def runs(folder: Path) -> list[str]:
    """The runs of which there is a model, the latest last."""
    found = [path for which in get_args(Which) for path in folder.glob(f"*/{which}.safetensors")]
    return list(dict.fromkeys(path.parent.name for path in sorted(found, key=lambda path: path.stat().st_mtime)))


def _there(folder: Path) -> str:
    return f"models are there of {', '.join(runs(folder)) or 'no run'}"
