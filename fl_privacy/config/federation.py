"""The federation as YAML: the only source of truth for every process and engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from fl_privacy.behaviours import BEHAVIOURS, Behaviour
from fl_privacy.choices import Chosen, Model
from fl_privacy.coding import FLOAT32, Coding
from fl_privacy.combine.rules import RULES, FedAvg, Rule
from fl_privacy.config.checks import problems
from fl_privacy.config.evaluate import Evaluate, form_of, short
from fl_privacy.config.pinned import Pinned, beside
from fl_privacy.config.stop import Stop
from fl_privacy.config.task import Task, located
from fl_privacy.config.topology import Topology
from fl_privacy.dp.gaussian import LARGEST_EPSILON
from fl_privacy.errors import ConfigError
from fl_privacy.reading import ADDRESS, DEVICE, NAME, mapping, merged, text_of, validated
from fl_privacy.routes import ROUTES
from fl_privacy.routes.base import Route
from fl_privacy.routes.shuffler import ShufflerRoute
from fl_privacy.steps import STEPS
from fl_privacy.steps.base import Off, Privatise, Step

MAX_SITES = 10_000
WITH_DATA = "with_data"

Address = Annotated[str, Field(pattern=ADDRESS)]


class Site(Model):
    """One participant. Its data never leave the site."""

    name: str = Field(pattern=NAME)
    epsilon: float | None = Field(None, gt=0, description="privacy budget per round; omit it without `privatise`")
    epsilon_total: float | None = Field(
        None, gt=0, lt=LARGEST_EPSILON, description="or the budget of all `rounds` together; all sites in the same form"
    )
    organisation: str | None = Field(None, pattern=NAME, description="who runs the site; default: its name")
    device: str = Field("cpu", pattern=DEVICE, description="cpu, cuda or cuda:N")
    data: Path | None = Field(None, description="the site's data folder; default: the run's --data-dir")
    policy: Path | None = Field(None, description="the site's policy file on this machine; a kit has its own")
    behaviour: Annotated[Behaviour, Chosen(BEHAVIOURS)] | None = Field(
        None, description="misbehave on purpose, to measure a defence; only with `audit: true`"
    )

    @property
    def budget(self) -> float | None:
        """Epsilon as the config gives it, for the federation's `budget_rounds`."""
        return self.epsilon if self.epsilon_total is None else self.epsilon_total

    @property
    def run_by_others(self) -> dict[str, str]:
        """The organisation, if it is another than the site itself."""
        return {} if self.organisation in (None, self.name) else {"organisation": str(self.organisation)}

    @property
    def tier(self) -> str:
        """The privacy label of the site's updates: its budget, which says nothing about its number of records."""
        return "" if self.budget is None else f"{self.budget:g}"


class Canaries(Model):
    """Training records that each take part by a fair coin: attacks are asked which of them did."""

    fraction: float = Field(0.5, gt=0, le=1, description="of a site's training records")


class Hosts(Model):
    """The addresses of the listening roles, as host:port. Sites accept no connections."""

    superlink: Address
    shuffler: Address | None = None
    aggregators: tuple[Address, ...] = ()
    evaluator: Address | None = None
    mailbox: Address | None = None
    mixes: tuple[Address, ...] = ()
    regions: tuple[Address, ...] = ()

    @classmethod
    def listing(cls, role: str) -> str:
        """The key for the addresses of a role: its name, or the plural where there are several."""
        return next((key for key in (f"{role}s", f"{role}es") if key in cls.model_fields), role)

    def of(self, role: str, name: str) -> Address | None:
        """Where a party is dialled: `aggregator-1` is the second of `aggregators`, and `mix-1` of `mixes`."""
        many = getattr(self, self.listing(role), None)
        if not isinstance(many, tuple):
            return many
        number = name.rpartition("-")[2]
        return many[int(number)] if number.isdecimal() and int(number) < len(many) else None


class Federation(Model):
    """A federation: who takes part, what they learn, and a choice for each step of an update's path."""

    name: str = Field("federation", pattern=NAME)
    sites: tuple[Site, ...] = Field(description="a count, a count with shared settings, or a list of sites")
    task: Task = Task()
    rounds: int = Field(5, ge=1, le=100_000)
    stop: Stop = Stop()
    init: Pinned | None = Field(
        None,
        description="a model file to start from: safetensors or a PyTorch state dict; default: made from the seed",
    )
    cohort: int = Field(0, ge=0, validate_default=True, description="sites per round; default (0): all")
    quorum: int = Field(
        0, ge=0, validate_default=True, description="fewest updates that complete a round; default (0): cohort"
    )
    deadline: float = Field(120.0, gt=0, le=86_400, description="time limit per round, in seconds")
    rounds_per_message: Literal["auto"] | Annotated[int, Field(ge=1, le=100_000)] = Field(
        "auto", description="rounds started by one Flower message; auto: as many as the route allows"
    )
    attempts: int = Field(3, ge=1, le=100, description="attempts at a round before the run fails")
    seed: int = Field(0, ge=0, lt=2**63, description="partition, initial model, cohorts, local training, shard masks")
    reproducible: bool = Field(False, description="seed keys and noise: the run is repeatable and NOT private")
    audit: bool = Field(False, description="middleware and sites also record their own views, to score attacks")
    canaries: Canaries | None = Field(
        None, description="training records that take part by a coin, to measure membership inference; only with audit"
    )
    with_data: dict[str, Any] = Field(
        {}, exclude=True, description="keys that go over the others in `up` and `plan` if a data folder is given"
    )
    topology: Topology | None = Field(None, description="who is connected to whom, and how far that exposes a site")
    privatise: Annotated[Privatise, Chosen(STEPS, "privatise.")] = Off()
    permute: Annotated[Step, Chosen(STEPS, "permute.")] = Off()
    compress: Annotated[Step, Chosen(STEPS, "compress.")] = Off()
    encode: Annotated[Step, Chosen(STEPS, "encode.")] = Off()
    route: Annotated[Route, Chosen(ROUTES)] = ShufflerRoute()
    combine: Annotated[Rule, Chosen(RULES)] = FedAvg()
    evaluate: Annotated[Evaluate, BeforeValidator(short)] = Evaluate()
    hosts: Hosts | None = Field(None, description="for `provision`: addresses of the roles on real machines")

    @field_validator("sites", mode="before")
    @classmethod
    def _sites_from_count(cls, value: Any) -> Any:
        """`sites: 5` means site-0 to site-4; `{count: 200, epsilon: [0.5, 8]}` assigns the budgets in turn."""
        shared = dict(value) if isinstance(value, dict) else {}
        count = shared.pop("count", None) if shared else value
        if isinstance(value, list | tuple) and value:
            return value
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError("needs a count, a list of sites, or {count: N, epsilon: ...}")
        if not 1 <= count <= MAX_SITES:
            raise ValueError(f"{count} is not a count from 1 to {MAX_SITES}")
        grids = {key: shared.pop(key) for key in ("epsilon", "epsilon_total") if key in shared}
        turns = {key: grid if isinstance(grid, list) and grid else [grid] for key, grid in grids.items()}
        return [
            {"name": f"site-{i}", **{key: grid[i % len(grid)] for key, grid in turns.items()}, **shared}
            for i in range(count)
        ]

    @field_validator("rounds_per_message", mode="wrap")
    @classmethod
    def _auto_or_number(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError("use auto or a number from 1 to 100000") from None

    @model_validator(mode="before")
    @classmethod
    def _defaults_from_sites(cls, values: Any) -> Any:
        """Cohort and quorum default to all sites and to the whole cohort."""
        if not isinstance(values, dict) or "sites" not in values:
            return values
        sites = values["sites"]
        count = sites.get("count", 0) if isinstance(sites, dict) else sites
        count = count if isinstance(count, int) else len(count) if isinstance(count, list | tuple) else 0
        cohort = values.get("cohort") or count
        return {**values, "cohort": cohort, "quorum": values.get("quorum") or cohort}

    @model_validator(mode="after")
    def _check(self) -> Federation:
        for problem in problems(self):
            raise ValueError(problem)
        return self

    @classmethod
    def load(cls, path: str | Path, data_dir: Path | None = None) -> Federation:
        """Read and validate a YAML file. An error is one line with field, value, reason and fix.

        With a data folder, what the file has under `with_data` goes over its other keys.
        """
        values = mapping(text_of(path), str(path))
        over = values.get(WITH_DATA)
        if data_dir is not None and isinstance(over, Mapping):
            values = merged({key: value for key, value in values.items() if key != WITH_DATA}, over)
        return cls.of(values, str(path), Path(path).parent)

    @classmethod
    def parse(cls, text: str, source: str = "config", folder: Path = Path()) -> Federation:
        """Validate YAML text; its paths are relative to `folder`."""
        return cls.of(mapping(text, source), source, folder)

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str = "config", folder: Path = Path()) -> Federation:
        """Validate keys and values as they are written in YAML."""
        return validated(cls, located(beside(values, folder, "init", "topology"), folder), source)

    def starting_from(self, model: Path | None) -> Federation:
        """The federation with this file as its initial model, if one is given."""
        return self if model is None else self.model_copy(update={"init": Pinned.of(model, "init")})

    def to_yaml(self) -> str:
        """The whole federation with defaults and the task's code filled in, as every process of a run reads it."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)

    @property
    def digest(self) -> str:
        """SHA-256 of what all parties must agree on; excludes paths, and each site's device and policy."""
        values = self.model_dump(mode="json", exclude={"hosts": True, "task": {"code", "source"}, "topology": {"file"}})
        values["init"] = self.init and self.init.sha256
        agreed = {"name", "epsilon", "epsilon_total"}
        values["sites"] = [site.model_dump(include=agreed) | site.run_by_others for site in self.sites]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def site(self, name: str) -> Site:
        for site in self.sites:
            if site.name == name:
                return site
        raise ConfigError(f"site {name!r} is not in federation {self.name!r}; it has {', '.join(self.site_names[:10])}")

    @property
    def site_names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @property
    def floor(self) -> int:
        """Smallest number of updates that may be released together on this route."""
        return self.route.floor

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of an update at its site, in order."""
        return self.privatise, self.permute, self.compress, self.encode

    @property
    def agrees(self) -> bool:
        """Whether the sites agree on a secret that the server does not know."""
        return any(step.agrees for step in self.steps)

    @property
    def stamp_bytes(self) -> int:
        """Bytes that go with every upload, for the server to compare."""
        return sum(step.stamp_bytes for step in self.steps)

    @cached_property
    def coding(self) -> Coding:
        """How updates travel."""
        return self.combine.coded(self.encode.coded(self.compressed, self), self)

    @property
    def compressed(self) -> Coding:
        """How updates would travel if they were not encoded."""
        return reduce(lambda coding, step: step.coded(coding, self), self.steps[:-1], FLOAT32)

    @property
    def unit(self) -> str | None:
        """What the noise protects: a site or a record; None without noise."""
        return self.privatise.unit

    @property
    def bytes_of_counts(self) -> int:
        """Bytes of one site's counts in a round in which it evaluates; 0 where sites never do."""
        return 8 * form_of(self).length if self.sites_evaluate else 0

    @property
    def budget_rounds(self) -> int:
        """How many rounds a site's budget is for: one, or with `epsilon_total` all of them."""
        total = any(site.epsilon_total is not None for site in self.sites[:1])  # all sites have the same form
        return self.rounds if total else 1

    @property
    def sites_evaluate(self) -> bool:
        """Whether sites evaluate the model and send counts; otherwise the server or the evaluator has data to do it."""
        return self.evaluate.by == "sites" or (
            self.evaluate.by == "auto" and self.route.carries_counts and self.task.by_site
        )

    @property
    def plain_counts(self) -> bool:
        """Whether counts of held-out records leave the sites without noise."""
        return self.sites_evaluate and self.evaluate.epsilon is None

    @property
    def rounds_per_ticket(self) -> int:
        """Rounds started by one Flower message."""
        auto = self.rounds if self.route.long_tickets else 1
        return auto if self.rounds_per_message == "auto" else self.rounds_per_message


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Texts of several lines, such as a task's code, are written so that people can read them."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})  # libyaml is ten times as fast
_Dumper.add_representer(str, _text)


def schema() -> dict[str, Any]:
    """The JSON schema of a federation, with the short forms of `sites` and `init`."""
    made = Federation.model_json_schema()
    made["properties"]["init"]["anyOf"].insert(0, {"type": "string"})
    made["properties"]["sites"] = {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": MAX_SITES},
            {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
            made["properties"]["sites"],
        ],
        "title": "Sites",
        "description": made["properties"]["sites"]["description"],
    }
    made["properties"]["evaluate"] = {
        "anyOf": [{"enum": ["auto", "sites", "server"]}, {"$ref": "#/$defs/Evaluate"}],
        "default": {},
    }
    return made
