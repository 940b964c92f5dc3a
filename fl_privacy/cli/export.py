"""Exporting a run's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fl_privacy.errors import FederationError

from .common import Json, RunsDir, app, out


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="RUN|KIT", help="A run, or a kit's folder.", show_default=False)],
    to: Annotated[Path, typer.Option(help="File to write: .safetensors, .pt or .onnx.", show_default=False)],
    round: Annotated[str, typer.Option(help="Which model: last, best, or after this round.")] = "last",
    run: Annotated[str | None, typer.Option(help="Of a kit: which run; default: the newest.")] = None,
    shape: Annotated[str | None, typer.Option(help="For ONNX: shape of one record, as 3,32,32.")] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: Json = False,
) -> None:
    """Write a run's model as a file of its own, and beside it a card that says where it comes from."""
    from fl_privacy.export.source import locate
    from fl_privacy.export.write import write

    found = locate(source, round, run, runs_dir)
    card, facts = write(found, to, None if shape is None else _shape(shape))
    if as_json:
        print(json.dumps({"file": str(to), "card": str(card), **facts}))
        return
    text = f"{to}: the model after round {found.round} of {found.name}, {found.layout.size:,} parameters"
    out.print(f"{text}\n{card}: its card", highlight=False, soft_wrap=True, markup=False)


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise FederationError(f"shape: {text!r} is not a shape; use positive numbers and commas, as 3,32,32")
    return tuple(int(part) for part in parts)
