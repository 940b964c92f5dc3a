"""`task:` in a federation's YAML: a data set with a model of ours, or a task of your own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fl_privacy.choices import Model
from fl_privacy.errors import ConfigError
from fl_privacy.reading import text_of, validated
from fl_privacy.tasks.catalog import MODELS
from fl_privacy.tasks.dataset import DATASETS, DataSet

LONGEST_CODE = 2**20  # characters
GUESS = 1000  # training records of a site, where nobody said how many
PATHS = ("data", "policy")  # of a site
OURS_ONLY = ("dataset", "model", "hidden", "partition")


class Partition(Model):
    """How a data set is split among the sites."""

    kind: Literal["iid", "dirichlet", "coupled", "by-site", "auto"] = Field(
        "auto", description="auto: by-site where every site has data of its own, else iid"
    )
    alpha: float = Field(0.5, gt=0, le=1e6, description="Dirichlet concentration; smaller is more skewed")
    eta: float = Field(0.5, ge=0, le=1, description="coupled: the share of a site's classes that its position decides")
    position: Literal["organisation", "degree"] = Field(
        "organisation", description="coupled: what decides: the organisation (or else the site), or the degree"
    )
    records: int | None = Field(None, ge=1, description="training records per site at most; default: all are dealt out")
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="coupled: training records of each site; fewer in proportion where classes run out"
    )

    @model_validator(mode="after")
    def _only_coupled(self) -> Partition:
        for name in ("eta", "position", "sizes"):
            if name in self.model_fields_set and self.kind != "coupled" and getattr(self, name) != _default(name):
                raise ValueError(f"task.partition.{name}: has an effect with kind: coupled only; remove it")
        return self

    @property
    def dealing(self) -> Literal["iid", "dirichlet", "coupled", "by-site"]:
        """How a benchmark is dealt out."""
        return "iid" if self.kind == "auto" else self.kind

    @property
    def skew(self) -> float | None:
        """The Dirichlet concentration of the classes at a site; None if they are not skewed on purpose."""
        return self.alpha if self.kind in ("dirichlet", "coupled") else None


def _default(name: str) -> Any:
    return Partition.model_fields[name].default


class Training(Model):
    """Local training in one round."""

    epochs: int = Field(5, ge=1, le=1000)
    batch_size: int = Field(16, ge=1, le=65536)
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the last linear layer's inputs that training drops")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of every label that goes to all classes")
    crop: int | None = Field(
        None, ge=1, le=4096, description="side of a random square of every image, enlarged to its size; default: none"
    )
    instahide: int | None = Field(
        None,
        ge=1,
        le=16,
        description="records that InstaHide mixes into one, which it gives random signs; default: none",
    )

    @property
    def regularised(self) -> str:
        """The first of the regularising fields that is set; empty if none is."""
        return next((name for name in ("dropout", "label_smoothing", "crop", "instahide") if getattr(self, name)), "")


class Task(Model):
    """What the federation learns: `dataset` and `model`, or `code`, or `name`."""

    code: str | None = Field(None, max_length=4096, description="a Python file with a Task class, beside the config")
    name: str | None = Field(None, description="a task that an installed package adds")
    options: dict[str, Any] = Field({}, description="settings of the data set or of your task")
    dataset: str = Field(
        "digits",
        description="a data set of ours, or one that an installed package adds",
        json_schema_extra={"anyOf": [{"enum": [*DATASETS.ours()]}, {"type": "string"}]},
    )
    model: str = Field("mlp", json_schema_extra={"enum": [*MODELS]})
    hidden: tuple[Annotated[int, Field(ge=1, le=100_000)], ...] | None = Field(
        None, max_length=8, description="hidden layer widths of the mlp; default: the model's own"
    )
    partition: Partition = Partition()
    train: Training = Training()
    records: int | None = Field(None, ge=1, description="training records of an average site, for `plan`")
    source: str | None = Field(None, max_length=LONGEST_CODE, description="filled in: the text of `code`")
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$", description="filled in: the digest of the task's code")

    @field_validator("code")
    @classmethod
    def _shown_as_it_is(cls, code: str | None) -> str | None:
        """It stands in messages, in logs and in what an operator reads."""
        if code is not None and not code.isprintable():
            raise ValueError("has characters that cannot be shown; rename the file")
        return code

    @field_validator("dataset")
    @classmethod
    def _known_data(cls, name: str) -> str:
        if name not in DATASETS:
            raise ValueError(f"unknown; use one of {', '.join(DATASETS)}, or your own task with code: task.py")
        return name

    @field_validator("model")
    @classmethod
    def _known_model(cls, name: str) -> str:
        if name not in MODELS:
            raise ValueError(f"unknown; use one of {', '.join(MODELS)}, or your own task with code: task.py")
        return name

    @model_validator(mode="after")
    def _one_way(self) -> Task:
        if self.code is not None and self.name is not None:
            raise ValueError("task: has both code and name; remove one")
        if self.code is None and self.source is not None:
            raise ValueError("task.source: is the text of task.code, and there is none; remove it")
        if self.is_own:
            for field in OURS_ONLY:
                if field in self.model_fields_set and getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(f"task.{field}: your own task brings its data and its model; remove it")
        if self.source is not None and self.sha256 != digest_of(self.source):
            raise ValueError("task.source: does not have the digest in task.sha256; use the files as they were written")
        if not self.is_own:
            _ = self.data_set  # its options are checked now
        if self.partition.records is not None and self.by_site:
            raise ValueError("task.partition.records: sites have records of their own; use iid or dirichlet")
        return self

    @property
    def is_own(self) -> bool:
        """Whether the task is somebody's code, which a site must accept before it runs it."""
        return self.code is not None or self.name is not None

    @property
    def data_set(self) -> DataSet:
        """The data set with its options; only if the task is not somebody's own."""
        try:
            return validated(DATASETS.get(self.dataset), self.options, "task.options")
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @property
    def by_site(self) -> bool:
        """Every site has its own records, and the server has none."""
        if self.is_own:
            return True
        asked = self.partition.kind
        return asked == "by-site" or (asked == "auto" and not self.data_set.pooled)

    def centre(self, site: str, number: int) -> str:
        """Which of the data's own sites a site of the federation is: the one of its name, or by position."""
        centres = self.data_set.sites
        return site if site in centres or not centres else centres[number]

    def typical_records(self, sites: int) -> int:
        """The training records of an average site: as stated, or as a benchmark has them; else a guess."""
        if self.records is not None or self.guesses_records:
            return self.records or GUESS
        shares = len(self.data_set.sites) if self.by_site else sites
        return min(max(1, self.data_set.train // shares), self.partition.records or self.data_set.train)

    @property
    def guesses_records(self) -> bool:
        """Whether nothing says how many training records there are but `records`."""
        return self.is_own or not self.data_set.train

    @property
    def label(self) -> str:
        """What policies and reports call it."""
        return self.name or self.code or self.dataset


def digest_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def located(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A config as it was written, with the paths in it relative to its own folder, and the task's code filled in."""
    sites = values.get("sites")
    if isinstance(sites, list):
        values = values | {"sites": [_beside(site, folder) if isinstance(site, dict) else site for site in sites]}
    elif isinstance(sites, dict):
        values = values | {"sites": _beside(sites, folder)}
    return _with_code(values, folder)


def _beside(site: dict[str, Any], folder: Path) -> dict[str, Any]:
    return site | {key: str((folder / site[key]).absolute()) for key in PATHS if isinstance(site.get(key), str)}


def _with_code(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the text of the code file beside the config, and its digest."""
    task = values.get("task")
    if not isinstance(task, dict) or task.get("source") is not None:
        return values
    if isinstance(task.get("code"), str):
        source = _text_of(folder, task["code"])
        return values | {"task": task | {"source": source, "sha256": digest_of(source)}}
    if isinstance(task.get("name"), str) and task.get("sha256") is None:
        from fl_privacy.tasks.installed import digest

        return values | {"task": task | {"sha256": digest(task["name"])}}
    return values


def _text_of(folder: Path, code: str) -> str:
    """The text of a Python file beside the config, and of nothing else: it goes to every party of the federation."""
    fix = "put the task's file into the config's folder, as task.py, say"
    try:
        path, home = (folder / code).resolve(), folder.resolve()
        below, size = path.is_relative_to(home), path.stat().st_size if path.is_file() else 0
    except (OSError, ValueError, RuntimeError):
        raise ConfigError(f"task.code {code!r}: is no path; {fix}") from None
    if not below or Path(code).suffix != ".py":
        raise ConfigError(f"task.code {code!r}: is not a .py file in the config's folder or below; {fix}")
    if size > 4 * LONGEST_CODE:
        raise ConfigError(f"task.code {code!r}: has {size:,} bytes; use at most {LONGEST_CODE:,} characters")
    if path.exists() and not path.is_file():
        raise ConfigError(f"task.code {code!r}: is not a file; {fix}")
    return text_of(folder / code, "task.code")
