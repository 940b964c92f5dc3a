"""What the ServerApp reads from its own disk: where the federation's config, keys and peers are."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fl_privacy.config import Federation
from fl_privacy.deploy.parties import observers
from fl_privacy.deploy.place import Place
from fl_privacy.errors import ConfigError


def new_run_name(federation: Federation) -> str:
    return f"{federation.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class ServerPlan(BaseModel):
    """`server.json` in the home folder that the run config names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    run_dir: Path
    config: Path
    keys: Path
    log: Path
    middleware: list[str] = []
    evaluator: str | None = None
    data_dir: Path | None = None
    observers: dict[str, str] = {}
    # Simulated sites cannot wait for the next round where they outnumber their processes.
    invite_every_round: bool = False
    metrics: str | None = None
    events: Path | None = None

    @classmethod
    def of(cls, place: Place, run_dir: Path, log: Path, invite_every_round: bool = False) -> ServerPlan:
        """The plan of a run for the server at `place`."""
        return cls(
            run=run_dir.name,
            run_dir=run_dir,
            config=place.config,
            keys=place.keys.folder,
            log=log,
            middleware=list(place.middleware),
            evaluator=place.evaluator,
            data_dir=place.data,
            observers=observers(place.federation),
            invite_every_round=invite_every_round,
            metrics=place.metrics,
            events=place.events,
        )

    @staticmethod
    def lock(home: Path) -> Path:
        """The ServerApp holds this lock for as long as it runs: a run has one at a time."""
        return home / "server.lock"

    def write(self, home: Path) -> None:
        (home / "server.json").write_text(self.model_dump_json(indent=2))

    @classmethod
    def load(cls, home: str) -> ServerPlan:
        try:
            return cls.model_validate_json((Path(home) / "server.json").read_bytes())
        except (OSError, ValueError):
            raise ConfigError(f"home: {home!r} has no usable server.json; start runs with fl-privacy up") from None
