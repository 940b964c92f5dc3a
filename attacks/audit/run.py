"""Running a matrix: each cell and seed once, finished ones kept, one failure stopping no other."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attacks
from attacks.audit.facts import ended, planned
from attacks.audit.matrix import Audit, Job
from attacks.audit.progress import Progress
from attacks.version import SUITE
from fl_privacy.deploy.engines.engine import up
from fl_privacy.deploy.engines.follow import Result
from fl_privacy.deploy.preflight import checks
from fl_privacy.errors import FederationError, LaunchError
from fl_privacy.report import machine

METRICS = ("rmse", "accuracy", "loss")


@dataclass(frozen=True)
class Failure:
    """A cell that could not be run or attacked."""

    cell: str
    seed: int
    reason: str


def key(job: Job) -> str:
    """What a finished run is found again by: everything that its numbers depend on.

    Of the federation what the matrix says, not the defaults: another version may have more options.
    """
    facts = {
        "federation": job.federation.model_dump(mode="json", exclude_unset=True),
        "attacks": job.attacks,
        "suite": SUITE,
    }
    facts |= {name: value for name in ("views", "curves") if (value := getattr(job, name))}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


class Store:
    """The finished runs: one JSON file each, there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, job: Job) -> dict[str, Any] | None:
        try:
            found = json.loads(self._path(job).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, job: Job, record: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(job), json.dumps(plain(record), separators=(",", ":")))

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """In order, and of several with the same federation only the first."""
        found: dict[str, Job] = {}
        for job in jobs:
            if self.read(job) is None:
                found.setdefault(key(job), job)
        return list(found.values())

    def _path(self, job: Job) -> Path:
        return self._folder / f"{key(job)}.json"


def write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def plain(value: Any) -> Any:
    """As JSON has it: numbers of numpy become Python's, and what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check(audit: Audit, data_dir: Path | None) -> None:
    """Every attack and every data set is there before the first run starts."""
    for name in {name for job in audit.jobs for name in job.attacks}:
        attacks.known(name)
    federations = {job.federation.task.label: job.federation for job in audit.jobs}
    bad = [found for f in federations.values() if not (found := checks.data(f, data_dir)).ok]
    if bad:
        raise LaunchError("; ".join(f"{found.detail}; {found.fix}" for found in bad))


def execute(
    audit: Audit,
    store: Store,
    out: Path,
    data_dir: Path | None,
    keep_runs: bool,
    progress: Progress,
    most: int | None = None,
) -> list[Failure]:
    """Run what is missing, at most so many runs. An interruption leaves the finished runs and nothing else."""
    with _alone(out):
        failures: list[Failure] = []
        missing = store.missing(audit.jobs)
        progress.begin(len({key(job) for job in audit.jobs}), len(missing))
        for job in missing[:most]:
            folder = out / "runs" / job.label
            shutil.rmtree(folder, ignore_errors=True)
            progress.start(job)
            try:
                record = _one(job, folder, data_dir, progress)
                store.write(job, record)
                progress.done(job, record["seconds"])
            except KeyboardInterrupt:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            except Exception as error:
                failures.append(Failure(job.cell, job.seed, _reason(error, folder)))
                progress.failed(job, failures[-1].reason)
                continue
            if not keep_runs:
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            (out / "runs").rmdir()
        return failures


def _one(job: Job, folder: Path, data_dir: Path | None, progress: Progress) -> dict[str, Any]:
    """Run a cell in a folder of its own (its sites' ledgers start empty) and attack its transcript."""
    began = time.monotonic()
    result = up(job.federation, "simulation", folder, data_dir, watch=progress.watch)
    if result.status != "completed":
        raise LaunchError(f"run {result.run} failed: {result.reason} (logs: {result.path}/logs)")
    progress.attacking()
    found = _attacked(job, Path(result.path), data_dir)
    facts = {"run": _metrics(result), "plan": planned(job.federation), "end": ended(Path(result.path))}
    return {
        "cell": job.cell,
        "seed": job.seed,
        "attacks": list(job.attacks),
        "suite": SUITE,
        "versions": machine.versions(),
        "seconds": round(time.monotonic() - began, 2),
        "run_seconds": result.seconds,
        "rounds": result.rounds,
        "measures": {**facts, **{name: one["measures"] for name, one in found.items()}},
        "curves": {name: kept for name, one in found.items() if (kept := _kept(one.get("curves") or {}, job.curves))},
    }


def _attacked(job: Job, run: Path, data_dir: Path | None) -> dict[str, Any]:
    """What the attacks find, by attack; as each set of colluding parties finds it, by attack@label."""
    if not job.attacks:
        return {}
    if not job.views:
        return attacks.replay(run, job.attacks, data_dir, seeds=1)
    found: dict[str, Any] = {}
    for label, observers in job.views:
        one = attacks.replay(run, job.attacks, data_dir, seeds=1, observers=observers)
        found |= {f"{name}@{label}": scores for name, scores in one.items()}
    return found


def _kept(curves: dict[str, Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    """Those that the matrix asks for; without that all but the ones of single sites (NAME/SITE)."""
    return {n: curve for n, curve in curves.items() if (n in wanted if wanted is not None else "/" not in n)}


def _metrics(result: Result) -> dict[str, Any]:
    there = {name: getattr(result, name) for name in METRICS}
    return {name: {"value": value, "chance": None} for name, value in there.items() if value is not None}


def _reason(error: Exception, folder: Path) -> str:
    """One line; what no user can fix leaves its traceback beside the run."""
    text = " ".join(str(error).split())
    if isinstance(error, FederationError | OSError):
        return text
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "traceback.txt").write_text("".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {text} (see {folder / 'traceback.txt'})"


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two audits in one folder would remove each other's runs."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"out: another audit is running in {out}; wait for it or give another --out") from None
        yield
