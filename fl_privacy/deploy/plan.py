"""What the ServerApp finds on its own disk: where the federation's config, keys and peers are."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fl_privacy.errors import ConfigError


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
    # Simulated sites cannot wait for the next round: there are fewer actors than sites.
    invite_every_round: bool = False
    metrics: str | None = None
    events: Path | None = None

    @classmethod
    def load(cls, home: str) -> ServerPlan:
        try:
            return cls.model_validate_json((Path(home) / "server.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"home: {home!r} has no usable server.json ({error}); start runs with fl-privacy up"
            ) from None
