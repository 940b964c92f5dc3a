"""Stock Flower on this machine: started as our local engine starts it, with the same TLS and node keys."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fl_privacy.addresses import free_port
from fl_privacy.config import Federation, ServerRoute
from fl_privacy.deploy import flower
from fl_privacy.deploy.engines.workspace import Workspace
from fl_privacy.deploy.plan import new_run_name
from fl_privacy.deploy.programs import forking, program

APP = Path(__file__).parent / "stock"
POLL = 0.5


@dataclass(frozen=True)
class Stock:
    """A run of one of Flower's own algorithms; the app gets the federation and `config` as its run config."""

    app: Path = APP
    config: Mapping[str, str] = field(default_factory=dict)
    dialled: Callable[[str, str], str] = lambda site, address: address  # where a site's node finds the SuperLink
    watch: Callable[[Workspace, Path], None] = lambda workspace, timings: None  # called at every look at the run

    def up(self, federation: Federation, runs_dir: Path, timeout: float, forks: bool = False) -> list[dict[str, Any]]:
        """Run it on the federation's task to the end; returns one line per round, with its time.

        With `forks`, for a try, Flower's programs are started as those of our engine are.
        """
        workspace = Workspace(
            federation.model_copy(update={"route": ServerRoute()}), new_run_name(federation), runs_dir, None
        )
        control = None
        try:
            if forks:
                workspace.load()
            control, run, timings = self._start(workspace)
            self._follow(workspace, control, run, timings, time.monotonic() + timeout)
            return lines(timings)
        finally:
            if control is not None:
                control.close()
            workspace.clear()

    def _start(self, workspace: Workspace) -> tuple[flower.Control, int, Path]:
        workspace.prepare()
        keys, address = workspace.keys("superlink", "superlink"), f"127.0.0.1:{free_port()}"
        home = {"FLWR_HOME": str(workspace.private / "superlink" / "flwr")}
        command = flower.superlink(address, keys, workspace.private / "superlink" / "state.db")
        workspace.fleet.start("superlink", _stock(workspace, command), home)
        control = flower.Control(address, keys.authority_file)
        control.wait(workspace.fleet.check)
        for partition, name in enumerate(workspace.federation.site_names):
            _start_node(workspace, control, self.dialled(name, address), name, partition)
        timings = workspace.private / "timings.jsonl"
        config = {"federation": workspace.federation.to_yaml(), "timings": str(timings), **self.config}
        return control, control.start_run(config, flower.build_app(self.app)), timings

    def _follow(self, workspace: Workspace, control: flower.Control, run: int, timings: Path, until: float) -> None:
        while (status := _status(control, run)).status != "finished":
            workspace.fleet.check()
            self.watch(workspace, timings)
            if time.monotonic() > until:
                raise TimeoutError("stock Flower did not finish in time")
            time.sleep(POLL)
        if status.sub_status != "completed":
            raise RuntimeError(
                f"stock Flower {status.sub_status}: {status.details or workspace.fleet.children['superlink'].tail()}"
            )


def _status(control: flower.Control, run: int) -> flower.Status:
    """As Flower says; a SuperLink that is too busy to answer is asked again."""
    try:
        return control.status(run)
    except httpx.TimeoutException:
        return flower.Status("running", "", "")


def lines(timings: Path) -> list[dict[str, Any]]:
    """What the app's server has written so far."""
    return [json.loads(line) for line in timings.read_text().splitlines()] if timings.exists() else []


def _start_node(workspace: Workspace, control: flower.Control, address: str, name: str, partition: int) -> None:
    folder = workspace.home / "nodes" / name
    folder.mkdir(parents=True, mode=0o700)
    control.register(flower.node_key(folder / "node.key"), name)
    authority = folder / "ca.pem"
    authority.write_bytes(workspace.keys("site", name).authority_file.read_bytes())
    # Our nodes get a worker's socket; a stock node gets its partition instead.
    *command, _ = flower.supernode(address, authority, folder / "node.key", free_port(), folder)
    command.append(f"partition-id={partition} num-partitions={len(workspace.federation.sites)}")
    workspace.fleet.start(f"supernode-{name}", _stock(workspace, command), {"FLWR_HOME": str(folder / "flwr")})


def _stock(workspace: Workspace, command: list[str]) -> list[str]:
    """Flower's program as it is: ours makes the processes that it starts forks."""
    if workspace.fleet.forks:
        return command
    *launcher, _ = forking("")
    assert command[: len(launcher)] == launcher
    name, *options = command[len(launcher) :]
    return [program(name), *options]
