"""The federation as YAML: the only source of truth for every process and engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fl_privacy.errors import ConfigError
from fl_privacy.reading import mapping, text_of, validated
from fl_privacy.roles import NAME as NAME

ADDRESS = r"^(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?):[0-9]{1,5}$"
MAX_SITES = 10_000

Address = Annotated[str, Field(pattern=ADDRESS)]


class Model(BaseModel):
    """Strict by default: an unknown key is a typo, and a config does not change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Site(Model):
    """One participant: its data never leave it."""

    name: str = Field(pattern=NAME)
    epsilon: float | None = Field(None, gt=0, description="privacy budget per round; none without `privatise`")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d{1,2})?)$", description="cpu, cuda or cuda:N")
    data: Path | None = Field(None, description="this site's data folder; default: the run's --data-dir")
    policy: Path | None = Field(None, description="this site's own policy file; it binds the worker")

    @property
    def tier(self) -> str:
        """The privacy label its updates travel under."""
        return "" if self.epsilon is None else f"{self.epsilon:g}"


class Partition(Model):
    """How a pooled data set is dealt to the sites."""

    kind: Literal["iid", "dirichlet", "by-site"] = "iid"
    alpha: float = Field(0.5, gt=0, le=1e6, description="Dirichlet concentration; smaller is more skewed")


class Training(Model):
    """Local training of one round."""

    epochs: int = Field(5, ge=1, le=1000)
    batch_size: int = Field(16, ge=1, le=65536)
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)


class Task(Model):
    """What is learned."""

    dataset: Literal["digits", "mnist", "cifar10", "heart-disease", "lcl"] = "digits"
    model: Literal["mlp", "lenet5", "cnn", "mobilecnn", "lstm"] = "mlp"
    hidden: tuple[Annotated[int, Field(ge=1, le=100_000)], ...] | None = Field(
        None, max_length=8, description="hidden widths of the mlp; default: the model's own"
    )
    partition: Partition = Partition()
    train: Training = Training()


class NoPrivatise(Model):
    """Updates leave the site as trained."""

    kind: Literal["none"] = "none"


class Ldp(Model):
    """The whole update is clipped and noised for the site's own epsilon (unit: the site; adjacency: replacement)."""

    kind: Literal["ldp"] = "ldp"
    clip: float = Field(1.0, gt=0, description="largest norm of an update; noise is 2 clip sigma(epsilon, delta)")
    delta: float = Field(1e-5, gt=0, lt=1)


class Dpsgd(Model):
    """DP-SGD: clipped and noised in every step of local training (unit: a record; adjacency: add or remove one)."""

    kind: Literal["dpsgd"] = "dpsgd"
    clip: float = Field(1.0, gt=0, description="largest norm of one record's gradient, over the whole model")
    delta: float = Field(1e-5, gt=0, lt=1)


class NoPermute(Model):
    """The model keeps its own coordinates."""

    kind: Literal["none"] = "none"


class NoCompress(Model):
    """Every coordinate of the update is sent."""

    kind: Literal["none"] = "none"


class NoEncode(Model):
    """Updates travel as float32."""

    kind: Literal["none"] = "none"


class ServerRoute(Model):
    """The baseline: updates go through Flower, and the server sees who sent what."""

    kind: Literal["server"] = "server"

    def parties(self) -> list[tuple[str, str]]:
        """Role and name of every process that this route adds to SuperLink, server and sites."""
        return []


class ShufflerRoute(Model):
    """Updates go to the shuffler, which hands the server a mixture."""

    kind: Literal["shuffler"] = "shuffler"
    level: Literal["model", "layer", "parameter"] = "parameter"
    n_min: int = Field(3, ge=2, description="fewest updates that may be released together")
    buckets: Literal["none", "published", "levelled"] = Field(
        "none",
        description="mix only within budget buckets: IntraShuffler's merge, or with noise topped up to the bucket's",
    )
    label: Literal["min", "mean"] = Field("min", description="the epsilon of a merged bucket")

    def parties(self) -> list[tuple[str, str]]:
        """The shuffler alone."""
        return [("shuffler", "shuffler")]


class ShardsRoute(Model):
    """Updates are cut into shards over several aggregators; the server sees none."""

    kind: Literal["shards"] = "shards"
    aggregators: int = Field(3, ge=2, le=255)
    n_min: int = Field(2, ge=2, description="fewest updates that may be averaged together")

    def parties(self) -> list[tuple[str, str]]:
        """The aggregators in order of their shards, and the evaluator."""
        return [*(("aggregator", f"aggregator-{k}") for k in range(self.aggregators)), ("evaluator", "evaluator")]


class Weighted(Model):
    """What every rule shares: how much an update counts by its privacy label."""

    weights: Literal["equal", "epsilon", "precision"] = Field(
        "equal", description="by epsilon, or by the inverse of the noise's variance; equal without `privatise`"
    )


class FedAvg(Weighted):
    """model + lr * mean update."""

    kind: Literal["fedavg"] = "fedavg"
    lr: float = Field(1.0, gt=0)


class FedProx(Weighted):
    """FedAvg whose sites add mu/2 |w - w_global|^2 to their loss."""

    kind: Literal["fedprox"] = "fedprox"
    lr: float = Field(1.0, gt=0)
    mu: float = Field(0.1, gt=0)


class FedAdam(Weighted):
    """Adam on the mean update (Reddi et al. 2021, Algorithm 2)."""

    kind: Literal["fedadam"] = "fedadam"
    lr: float = Field(0.1, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)


class FedYogi(Weighted):
    """Yogi on the mean update (Reddi et al. 2021, Algorithm 2)."""

    kind: Literal["fedyogi"] = "fedyogi"
    lr: float = Field(0.01, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)


class Hosts(Model):
    """Where the listening roles are dialled, as host:port; sites are dialled by nobody."""

    superlink: Address
    shuffler: Address | None = None
    aggregators: tuple[Address, ...] = ()
    evaluator: Address | None = None


Privatise = Annotated[NoPrivatise | Ldp | Dpsgd, Field(discriminator="kind")]
Route = Annotated[ServerRoute | ShufflerRoute | ShardsRoute, Field(discriminator="kind")]
Combine = Annotated[FedAvg | FedProx | FedAdam | FedYogi, Field(discriminator="kind")]


class Federation(Model):
    """A federation: who takes part, what is learned, and a choice at each arrow of an update's way."""

    name: str = Field("federation", pattern=NAME)
    sites: tuple[Site, ...] = Field(description="a count, a count and what all share, or a list of sites")
    task: Task = Task()
    rounds: int = Field(5, ge=1, le=100_000)
    cohort: int = Field(0, ge=0, validate_default=True, description="sites a round; default (0): all")
    quorum: int = Field(
        0, ge=0, validate_default=True, description="fewest answers that make a round; default (0): cohort"
    )
    deadline: float = Field(120.0, gt=0, le=86_400, description="seconds a round may take")
    rounds_per_message: int = Field(1, ge=1, le=10_000, description="rounds that one Flower message starts")
    attempts: int = Field(3, ge=1, le=100, description="tries at a round before the run fails")
    seed: int = Field(0, ge=0, lt=2**63, description="partition, initial model, cohorts, local training, shard masks")
    reproducible: bool = Field(False, description="seeded keys and noise: the run is repeatable and NOT private")
    audit: bool = Field(False, description="middleware and sites record their own views too, for attacks to be scored")
    privatise: Privatise = NoPrivatise()
    permute: NoPermute = NoPermute()
    compress: NoCompress = NoCompress()
    encode: NoEncode = NoEncode()
    route: Route = ShufflerRoute()
    combine: Combine = FedAvg()
    hosts: Hosts | None = Field(None, description="for `provision`: where the roles of real machines are dialled")

    @field_validator("sites", mode="before")
    @classmethod
    def _sites_from_count(cls, value: Any) -> Any:
        """`sites: 5` means site-0 to site-4; `{count: 200, epsilon: [0.5, 8]}` deals the budgets out in turn."""
        shared = dict(value) if isinstance(value, dict) else {}
        count = shared.pop("count", None) if shared else value
        if isinstance(count, bool) or not isinstance(count, int):
            return value
        if not 1 <= count <= MAX_SITES:
            raise ValueError(f"{count} is not a count from 1 to {MAX_SITES}")
        budgets = shared.pop("epsilon", None)
        grid = budgets if isinstance(budgets, list) and budgets else [budgets]
        return [{"name": f"site-{i}", "epsilon": grid[i % len(grid)], **shared} for i in range(count)]

    @model_validator(mode="before")
    @classmethod
    def _defaults_from_sites(cls, values: Any) -> Any:
        """Cohort and quorum default to all sites and to the whole cohort."""
        if not isinstance(values, dict) or "sites" not in values:
            return values
        sites = values["sites"]
        count = sites.get("count", 0) if isinstance(sites, dict) else sites
        count = count if isinstance(count, int) else len(count) if isinstance(count, list | tuple) else 0
        filled = dict(values)
        filled["cohort"] = filled.get("cohort") or count
        filled["quorum"] = filled.get("quorum") or filled["cohort"]
        return filled

    @model_validator(mode="after")
    def _check(self) -> Federation:
        from fl_privacy.config.checks import RULES

        for rule in RULES:
            problem = rule(self)
            if problem:
                raise ValueError(problem)
        return self

    @classmethod
    def load(cls, path: str | Path) -> Federation:
        """Read and validate a YAML file; every problem is one line with field, value, reason and fix."""
        return cls.parse(text_of(path), str(path))

    @classmethod
    def parse(cls, text: str, source: str = "config") -> Federation:
        """Validate YAML text."""
        return validated(cls, mapping(text, source), source)

    def to_yaml(self) -> str:
        """The whole federation, defaults filled in: what every process of a run reads."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @property
    def digest(self) -> str:
        """SHA-256 of what all parties must agree on; a site's data folder and device are its own affair."""
        values = self.model_dump(mode="json", exclude={"hosts"})
        values["sites"] = [{"name": site.name, "epsilon": site.epsilon} for site in self.sites]
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
        """Fewest updates that may be released together on this route."""
        return 1 if isinstance(self.route, ServerRoute) else self.route.n_min


def schema() -> dict[str, Any]:
    """The JSON schema of a federation, with `sites` as people write it."""
    made = Federation.model_json_schema()
    made["properties"]["sites"] = {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": MAX_SITES},
            {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
            made["properties"]["sites"],
        ],
        "title": "Sites",
        "description": made["properties"]["sites"]["description"],
    }
    return made
