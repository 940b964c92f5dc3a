"""Originals and reconstructions side by side, as one PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from attacks.inversion.quality import Pictures

INCH = 0.6  # per picture
MARGIN = 1.4  # for the names of the rows
DPI = 120


def grid(rows: Mapping[str, Pictures]) -> bytes:
    """One row per name, one column per picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(len(pictures) for pictures in rows.values())
    figure = Figure(figsize=(MARGIN + INCH * columns, INCH * len(rows)), dpi=DPI)
    FigureCanvasAgg(figure)
    left = MARGIN / (MARGIN + INCH * columns)
    axes = figure.subplots(
        len(rows), columns, squeeze=False, gridspec_kw={"left": left, "right": 1, "top": 1, "bottom": 0}
    )
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for cell in line:
            cell.set_axis_off()
        for cell, picture in zip(line, pictures, strict=False):
            shown = picture[0] if len(picture) == 1 else np.moveaxis(picture, 0, 2)
            cell.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        line[0].text(-0.1, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
