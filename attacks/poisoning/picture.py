"""Which cluster each site was in, round by round (Tazza, Figure 13), as one PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence

from attacks.poisoning.run import OUTLIER, Seen

INCH, DPI = 0.22, 120


def clusters(rounds: Sequence[Seen], honest: Sequence[str], poisoned: Sequence[str]) -> bytes:
    """Honest sites below, poisoned ones above the line; a colour per cluster, a cross where a model was left out."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sites, colours = [*honest, *poisoned], colormaps["tab10"].colors  # type: ignore[attr-defined]
    figure = Figure(figsize=(2 + INCH * max(8, len(rounds)), 1 + INCH * len(sites)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for one in rounds:
        for site, group in one.groups.items():
            cluster = one.clusters.get(site, group)
            colour = "black" if cluster is None else colours[cluster % len(colours)]
            axes.plot(one.round, sites.index(site), "x" if group == OUTLIER else "s", color=colour, markersize=5)
    axes.axhline(len(honest) - 0.5, color="black", linewidth=0.8)
    axes.set(xlabel="round", yticks=range(len(sites)), yticklabels=sites)
    axes.tick_params(axis="y", labelsize=6)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
