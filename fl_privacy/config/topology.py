"""`topology:` in a federation's YAML: who is connected to whom, and how far each site's position exposes it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from fl_privacy.choices import Model
from fl_privacy.errors import FederationError
from fl_privacy.reading import text_of
from fl_privacy.topology.graphs import build
from fl_privacy.topology.leverage import Floats, blended, degrees, group_sizes, on_size_grid, valid

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.topology.graphs import Graph

LONGEST = 2**22  # characters of a file with edges
OPTIONS = ("hub", "regions", "p", "m")


class Proxies(Model):
    """Weights of the proxies in a site's leverage. Each proxy is divided by its mean first, and so is the sum."""

    degree: float = Field(0.0, ge=0)
    group: float = Field(0.0, ge=0, description="the number of sites of the same organisation")
    size: float = Field(0.0, ge=0, description="`records`")


class Topology(Model):
    """The graph of the federation. Everything here is public, and all parties agree on it."""

    kind: Literal["star", "ring", "line", "hierarchical", "erdos-renyi", "barabasi-albert", "file"]
    seed: int | None = Field(None, ge=0, lt=2**63, description="of random graphs; default: the federation's")
    hub: str | None = Field(None, description="star: the site in the middle (default: the first), or server")
    regions: int | tuple[int, ...] | None = Field(None, description="hierarchical: how many, or the size of each")
    p: float | None = Field(None, description="erdos-renyi: probability of an edge; default 0.3")
    m: int | None = Field(None, description="barabasi-albert: edges of a new site; default 2")
    file: Path | None = Field(None, description="file: two sites per line")
    edges: str | None = Field(None, max_length=LONGEST, description="the text of `file`, filled in when it is read")
    records: tuple[int, ...] | None = Field(
        None, description="training records of each site as everybody may know them, rounded up to 2^(k/2)"
    )
    leverage: Proxies | tuple[float, ...] = Field(
        Proxies(degree=1.0), description="weights of degree, group and size, or a number per site; default: the degree"
    )

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, values: Any) -> Any:
        """With the text of the file, so that the federation's digest covers it."""
        if isinstance(values, dict) and isinstance(values.get("file"), str | Path) and values.get("edges") is None:
            return {**values, "edges": text_of(Path(values["file"]), "topology.file")}
        return values

    @field_validator("records")
    @classmethod
    def _rounded(cls, records: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The config is public: it keeps no exact number."""
        try:
            return None if records is None else tuple(map(on_size_grid, records))
        except FederationError as error:
            raise ValueError(str(error).removeprefix("records: ")) from None

    @cached_property
    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}

    def graph(self, federation: Federation) -> Graph:
        """The graph; sites are numbered as in the config."""
        names, options = federation.site_names, dict(self.given)
        if "hub" in options and options["hub"] in names:
            options["hub"] = names.index(options["hub"])
        seed = federation.seed if self.seed is None else self.seed
        if self.edges is not None:
            options |= {"names": names, "edges": self.edges}
        return build(self.kind, len(names), seed, **options)

    def leverages(self, federation: Federation) -> Floats:
        """Of every site: as given, or the blend of the proxies."""
        if not isinstance(self.leverage, Proxies):
            return valid(self.leverage, "topology.leverage", federation.site_names)
        n, weights = len(federation.sites), self.leverage
        parts: dict[str, tuple[float, Floats]] = {
            "degree": (weights.degree, degrees(self.graph(federation), n)),
            "group": (weights.group, group_sizes([site.organisation or site.name for site in federation.sites])),
            "size": (weights.size, np.array(self.sizes(federation), dtype=np.float64)),
        }
        return blended({name: part for name, part in parts.items() if part[0]} or parts)

    def sizes(self, federation: Federation) -> tuple[int, ...]:
        """What is public of the sites' numbers of records: as stated, or that of an average site for all."""
        count = len(federation.sites)
        return self.records or (on_size_grid(federation.task.typical_records(count)),) * count

    def problems(self, federation: Federation) -> Iterator[str]:
        """What does not fit the rest of the federation."""
        count = len(federation.sites)
        if self.kind != "file" and self.edges is not None:
            yield f"topology.file: kind is {self.kind}, which has no file; use kind: file, or remove it"
            return
        if self.kind == "file" and self.edges is None:
            yield "topology.file: kind is file, and there is none; add file: EDGES.txt"
            return
        for name, values in (("records", self.records), ("leverage", self.leverage)):
            if isinstance(values, tuple) and len(values) != count:
                yield f"topology.{name}: {len(values)} values for {count} sites; give one per site"
                return
        try:
            self.graph(federation)
            self.leverages(federation)
        except FederationError as error:
            yield str(error)
