"""`fl-privacy train KIT`: start and follow one run of a federation across machines, from the server's kit."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fl_privacy.config import Pinned
from fl_privacy.config.changes import accepted
from fl_privacy.deploy import flower
from fl_privacy.deploy.commands import LOOPBACK, START, Ports
from fl_privacy.deploy.engines.follow import Follower, Result, Submitted
from fl_privacy.deploy.flower import Unanswered
from fl_privacy.deploy.kits.kit import Folder
from fl_privacy.deploy.kits.serve import alone, check_own, healthy, prepare, supervisor
from fl_privacy.deploy.parties import starter
from fl_privacy.deploy.plan import ServerPlan, new_run_name
from fl_privacy.deploy.preflight.checks import disk
from fl_privacy.deploy.processes import Fleet
from fl_privacy.errors import ConfigError, Interrupted, LaunchError
from fl_privacy.files import write_public
from fl_privacy.models.initial import check as check_init
from fl_privacy.ops.log import Log
from fl_privacy.transcript.run import MANIFEST, anchor, load_manifest

POLL = 0.2
RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9-]{0,127}"
REACH = 300.0  # seconds to reach the SuperLink
OFTEN = 4.0  # seconds of pause before a restart: the process has exited four times by then


def train(
    folder: Folder,
    fresh: bool = False,
    name: str | None = None,
    watch: Callable[[Path], None] = lambda run_dir: None,
    init: Path | None = None,
) -> Result:
    """Resume the interrupted run, or start one, and follow it to its end."""
    if not folder.role.starts_runs:
        raise ConfigError(f"kit {folder.path}: belongs to a {folder.kit.role}; start runs from the server's kit")
    check_own(folder)
    if not (folder.path / "secret").is_file():
        raise LaunchError(f"kit {folder.path}: secret is missing; copy it from the superlink's kit")
    with alone(folder):
        _place_init(folder, init)
        prepare(folder)
        run = _run_name(folder, fresh, name)
        _check_resumed(folder, run, asked=name is not None)
        return _train(folder, run, watch)


def _place_init(folder: Folder, given: Path | None) -> None:
    """The pinned initial model must lie in the kit of the party that starts from it; `given` puts it there."""
    pinned, (_, name) = folder.federation.init, starter(folder.federation)
    if given is not None and pinned is None:
        fix = f"add init: {given.name} to its config and run fl-privacy provision again"
        raise ConfigError(f"init: the sites agreed on a federation that starts from its seed; {fix}")
    if given is not None and name != folder.kit.name:
        raise ConfigError(f"init: the {name} starts this federation, not the server; put the file into its kit")
    if given is not None and pinned is not None:
        own = Pinned(file=given, sha256=pinned.sha256)
        own.check("init")
        own.placed(folder.path, "init")
    if name == folder.kit.name:
        check_init(folder.federation)


def _run_name(folder: Folder, fresh: bool, name: str | None) -> str:
    """The unfinished run, unless a new one is asked for; its name is kept until it completes."""
    note = folder.state / "unfinished"
    if note.exists() and not fresh and name is None:
        return note.read_text().strip()
    name = name or new_run_name(folder.federation)
    if not re.fullmatch(RUN_NAME, name):
        raise ConfigError(f"run: {name!r} is not a valid name; use letters, digits and hyphens")
    note.write_text(name)
    return name


def _train(folder: Folder, run: str, watch: Callable[[Path], None]) -> Result:
    runs = folder.path / folder.kit.runs
    room = disk(runs)
    if not room.ok:
        raise LaunchError(f"disk: {room.detail}; {room.fix}")
    began, run_dir = time.monotonic(), runs / run
    fleet = Fleet(run_dir / "logs", folder.run / "pids.json")
    ports = Ports.free()
    watching = supervisor(folder, fleet, Log("server", fleet.log("train")), ports)
    control = None

    def check() -> None:
        watching.step()
        if any(one.name == "superexec" and one.backoff.pause > OFTEN for one in watching.watched):
            raise LaunchError("superexec: keeps exiting; copy secret from the superlink's kit")
        if healthy(folder, watching):
            (folder.run / "healthy").touch()
        fleet.trim()

    try:
        write_public(anchor(run_dir), folder.keys.authority_file.read_bytes())
        until = time.monotonic() + START
        while not watching.all_up:
            check()
            if time.monotonic() > until:
                raise LaunchError(f"server: its processes did not come up within {START:g} s; see {run_dir / 'logs'}")
            time.sleep(POLL)
        control = flower.Control(f"{LOOPBACK}:{ports.relay}", folder.run / "relay.pem")
        watching.log("reaching", superlink=folder.kit.superlink)
        submit = partial(_submit, folder, run_dir, fleet, control, check)
        submitted = Submitted(control, submit(), submit, ServerPlan.lock(folder.run))
        end = Follower(run_dir, submitted, check, watch, watching.log).end()
    except KeyboardInterrupt:
        # The ServerApp is stopped together with its executor and cannot log this itself.
        Log("server", run_dir / "logs" / "server.log")("failed", run=run, reason="KeyboardInterrupt: train was stopped")
        raise Interrupted(run_dir) from None
    finally:
        (folder.run / "healthy").unlink(missing_ok=True)
        if control is not None:
            control.close()
        fleet.stop("superexec")
        fleet.stop()
    watch(run_dir)
    if end[0] == "completed":
        (folder.state / "unfinished").unlink(missing_ok=True)
    return Result.of(run_dir, end, time.monotonic() - began, [])


def _submit(folder: Folder, run_dir: Path, fleet: Fleet, control: flower.Control, check: Callable[[], None]) -> int:
    """Give the run to Flower, once the SuperLink answers; returns Flower's number of it."""
    try:
        control.wait(check, REACH)
    except Unanswered:
        see = f"run fl-privacy preflight {folder.path} to find out why"
        raise LaunchError(f"superlink {folder.kit.superlink}: no answer within {REACH:g} s; {see}") from None
    ServerPlan.of(folder.place, run_dir, fleet.log("server")).write(folder.run)
    return control.start_run({"home": str(folder.run)}, flower.build_app())


def _check_resumed(folder: Folder, run: str, asked: bool) -> None:
    """A run continues only under its own config; one that nobody asked for can be left behind."""
    run_dir = folder.path / folder.kit.runs / run
    if not (run_dir / MANIFEST).exists():
        return
    try:
        accepted(load_manifest(run_dir)[0], folder.federation, run)
    except ConfigError as error:
        other = "" if asked else f"; or start another run with fl-privacy train {folder.path} --new"
        raise ConfigError(f"{error}{other}") from None


def export(result: Result, target: Path) -> bool:
    """Copy a run and the authority that it verifies against to another folder; False if that is not writable."""
    source = Path(result.path)
    try:
        shutil.copytree(source, target / source.name, dirs_exist_ok=True)
        shutil.copy(anchor(source), anchor(target / source.name))
    except OSError:  # shutil's own errors are
        return False
    return True
