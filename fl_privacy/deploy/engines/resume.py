"""Resuming a run: with what it was started, and whether this config may continue it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fl_privacy.choices import Model
from fl_privacy.config import Federation
from fl_privacy.config.changes import accepted, config_of
from fl_privacy.errors import LaunchError
from fl_privacy.ops.runs import find
from fl_privacy.ops.status import CONFIG
from fl_privacy.transcript.run import MANIFEST, authority_of
from fl_privacy.transcript.verify import signed_manifest

NOTE = "up.json"
NEVER = "never started; start a new run with fl-privacy up CONFIG"


class Start(Model):
    """`.state/RUN/up.json`: what `up` was called with, so that `up --resume RUN` needs nothing else."""

    engine: Literal["local", "simulation", "compose"] = "local"
    data_dir: Path | None = None

    def write(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / NOTE).write_text(self.model_dump_json())


@dataclass(frozen=True)
class Earlier:
    """A run that was started before."""

    run_dir: Path
    start: Start

    @classmethod
    def find(cls, run: str | Path, runs_dir: Path) -> Earlier:
        """By name or path."""
        run_dir = find(run, runs_dir).resolve()
        try:
            start = Start.model_validate_json((_home(run_dir) / NOTE).read_bytes())
        except (OSError, ValidationError):
            start = Start(engine="compose" if (_home(run_dir) / "compose.yaml").exists() else "local")
        return cls(run_dir, start)

    def federation(self) -> Federation:
        """As the run's manifest has it, or for a run without one (yet, or in its containers), as `up` wrote it."""
        if (self.run_dir / MANIFEST).exists():
            return config_of(_signed(self.run_dir), str(self.run_dir / MANIFEST))
        home = _home(self.run_dir)
        for config in (home / "federation.yaml", home / CONFIG):
            if config.exists():
                return Federation.load(config)
        raise LaunchError(f"resume {self.run_dir.name}: {NEVER}")


def check(run_dir: Path, federation: Federation) -> None:
    """Refuse to resume a run that has nothing to resume, or under another config."""
    name = run_dir.name
    if not (run_dir / MANIFEST).exists():  # it was interrupted while it started, and nobody knows it yet
        if not (_home(run_dir) / CONFIG).exists():
            raise LaunchError(f"resume {name}: {NEVER}")
        return
    manifest = _signed(run_dir)
    changed = {change.field for change in accepted(manifest, federation, name)}
    if manifest.get("status") == "completed" and "rounds" not in changed:
        done = manifest.get("rounds") or federation.rounds
        raise LaunchError(f"resume {name}: complete after {done} rounds; raise `rounds` in CONFIG to train longer")


def _signed(run_dir: Path) -> dict[str, Any]:
    """The manifest, as a server signed it: its config, with a task's code in it, is what starts here."""
    file = authority_of(run_dir)
    if not file.is_file():
        raise LaunchError(f"resume {run_dir.name}: {file} is missing, so nobody can tell who signed it; restore it")
    return signed_manifest(run_dir, file.read_bytes())


def _home(run_dir: Path) -> Path:
    return run_dir.parent / ".state" / run_dir.name
