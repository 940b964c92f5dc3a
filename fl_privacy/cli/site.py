"""A site in the background: start it, stop it, see its status."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_privacy.errors import FederationError
from fl_privacy.visible import visible

from .common import Json, app, say, show

if TYPE_CHECKING:
    from fl_privacy.deploy.kits.kit import Folder

commands = typer.Typer(help="Run a site in the background on this machine.", no_args_is_help=True)
app.add_typer(commands, name="site")

KitPath = Annotated[Path, typer.Argument(help="The site's start kit.", show_default=False)]


@commands.command()
def start(kit: KitPath, as_json: Json = False) -> None:
    """Check the kit, start the site and wait until it is up."""
    from fl_privacy.deploy.kits import background
    from fl_privacy.deploy.kits.kit import Folder

    _tell(background.start(Folder.open(kit)), as_json)


@commands.command()
def stop(kit: KitPath, as_json: Json = False) -> None:
    """Stop the site and all its processes."""
    from fl_privacy.deploy.kits import background
    from fl_privacy.deploy.kits.kit import Folder

    _tell(background.stop(Folder.open(kit)), as_json)


@commands.command()
def status(kit: KitPath, as_json: Json = False) -> None:
    """Show whether the site is up, what it does and what it has spent; exit code 1 if it is not up."""
    from fl_privacy.deploy.kits import background
    from fl_privacy.deploy.kits.kit import Folder

    found = background.status(Folder.open(kit))
    _tell(found, as_json)
    if found["state"] != "up":
        raise typer.Exit(1)


@commands.command()
def policy(kit: KitPath) -> None:
    """Print a policy that allows just this federation; read it, restrict it and save it as policy.yaml in the kit."""
    from fl_privacy.config.policy import template
    from fl_privacy.deploy.kits.kit import Folder

    folder = _of_site(Folder.open(kit))
    say(template(folder.federation, folder.kit.name).rstrip())


@commands.command()
def approve(
    kit: KitPath,
    run: Annotated[str, typer.Argument(help="The run's name.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: you know what the run does.")] = False,
    as_json: Json = False,
) -> None:
    """Let this site take part in a run (with `approve_runs: true` in its policy), after showing what it would do."""
    from fl_privacy.config import approvals
    from fl_privacy.config.policy import Policy
    from fl_privacy.deploy import ledgers
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.tasks import accepted

    folder = _of_site(Folder.open(kit))
    federation, name = folder.own_federation, folder.kit.name
    accepted.check(federation, folder.state, Policy.load(folder.policy).code if folder.policy else ())
    budget = ledgers.projected(federation, name, folder.state, folder.at(folder.kit.data))
    if not as_json:
        say(approvals.changes(folder.federation, folder.state) or folder.federation.to_yaml())
        say(f"run {run}: config {federation.digest}")
        for line in budget:
            say(line)
    if not yes and (as_json or not typer.confirm("Let this site take part in the run?")):
        raise FederationError("run: not approved; nothing was changed (use --yes once you know what it does)")
    approvals.approve(run, folder.federation, folder.state)
    show({"run": run, "digest": federation.digest, "approved": True, "budget": list(budget)}, as_json, ["approved"])


@commands.command("accept-task")
def accept_task(
    kit: KitPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: you have read the code.")] = False,
    as_json: Json = False,
) -> None:
    """Show the task's code and what changed since the last accepted version, and accept it to run at this site."""
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.tasks import accepted

    folder = Folder.open(kit)
    task = folder.federation.task
    if not task.is_own or not folder.role.has_node:
        raise FederationError(f"kit {kit}: has no task code to accept; nothing to do")
    if not as_json:
        say(accepted.offered(folder.federation, folder.state))
        say(f"{visible(task.label)}: sha256 {task.sha256}")
    if not yes and (as_json or not typer.confirm("Run this code at this site, with access to its data?")):
        raise FederationError("task: not accepted; nothing was changed (use --yes once you have read the code)")
    accepted.accept(folder.federation, folder.state)
    show({"task": task.label, "sha256": task.sha256, "accepted": True}, as_json, ["accepted"])


@commands.command()
def accept(
    kit: KitPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: you know who takes part.")] = False,
    as_json: Json = False,
) -> None:
    """Show who is in the federation's roster and what changed since the last accepted one, and accept it here."""
    from fl_privacy.deploy.kits.kit import Folder
    from fl_privacy.identity import accepted
    from fl_privacy.identity.keyring import Keyring

    folder = Folder.open(kit)
    if not folder.role.has_node:
        raise FederationError(f"kit {kit}: only a site accepts rosters; nothing to do")
    roster, old = Keyring(folder.keys.folder).roster(), accepted.last(folder.state)
    differs = list(accepted.changes(old, roster))
    for line in () if as_json else accepted.summary(roster, old, differs):
        say(line)
    done = accepted.is_accepted(roster, folder.state)
    if not done and not yes and (as_json or not typer.confirm("Take part with these parties?")):
        raise FederationError("roster: not accepted; nothing was changed (use --yes once you have read it)")
    accepted.accept(roster, folder.state)
    facts = {"serial": roster.serial, "digest": roster.digest, "changes": differs, "accepted": True}
    show(facts, as_json, ["accepted before" if done else "accepted"])


def _of_site(folder: Folder) -> Folder:
    if not folder.role.has_node:
        raise FederationError(f"kit {folder.path}: is of role {folder.kit.role}; use a site's kit")
    return folder


def _tell(found: dict[str, Any], as_json: bool) -> None:
    show(found, as_json, _lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """A site's status in words; only what is known has a line."""
    from fl_privacy.deploy import ledgers

    of = f" of federation {found['federation']}" if "federation" in found else ""
    yield f"{found['site']}{of}: {found['state']}" + (f" (pid {found['pid']})" if found.get("pid") else "")
    if found.get("processes"):
        yield _line("processes", ", ".join(f"{name} (pid {pid})" for name, pid in found["processes"].items()))
    if found.get("superlink"):
        yield _line("superlink", found["superlink"])
    if last := found.get("last"):
        facts = [f"{key} {last[key]}" for key in ("run", "round") if last.get(key) is not None]
        why = [str(last["reason"])] if last.get("reason") else []
        said = ", ".join([str(last["event"]), *facts, *_span(last, found["rounds"]), *why])
        yield _line("last event", f"{_time(last['time'])}  {said}")
    if declined := found.get("declined"):
        where = f"round {declined['round']} of {declined['run']}: " if declined["round"] is not None else ""
        yield _line("declined", f"{_time(declined['time'])}  {where}{declined['reason']}")
    if own := found.get("own"):
        yield _line("own metrics", f"{own['run']}, model {own['global']['model']}: {_measures(own['global'])}")
        if own["alone"]:
            yield _line("", f"trained alone: {_measures(own['alone'])}")
    if found.get("ledger"):
        yield _line("budget", ledgers.line(found["ledger"]))
    if found.get("metrics"):
        yield _line("metrics", found["metrics"])
    if found.get("logs"):
        yield _line("logs", found["logs"])


def _measures(line: dict[str, Any]) -> str:
    """Numbers of a line of the site's own journal, and why its task's own ones are missing."""
    numbers = {name: value for name, value in line.items() if isinstance(value, float)}
    problem = [str(line["metrics_error"])] if line.get("metrics_error") else []
    return ", ".join([*(f"{name} {value:.4g}" for name, value in numbers.items()), *problem])


def _span(event: dict[str, Any], rounds: int) -> Iterator[str]:
    """The rounds that an event is about; in those after the last one the site gets the final and the best model."""
    first, last = event.get("first"), event.get("last")
    if isinstance(first, int) and isinstance(last, int):
        if first <= rounds:
            yield f"round {first}" if first == min(last, rounds) else f"rounds {first} to {min(last, rounds)}"
        if last > rounds:
            yield "and the final model" if first <= rounds else "the final model"


def _line(key: str, value: str) -> str:
    """Logs may quote a peer: nothing in them controls the terminal."""
    return f"  {key:<11} " + "".join(c if c.isprintable() else " " for c in value)


def _time(at: Any) -> str:
    """Local time; event files have it as text, logs as seconds."""
    try:
        made = datetime.fromisoformat(at) if isinstance(at, str) else datetime.fromtimestamp(at)
        return made.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, TypeError, OverflowError, OSError):
        return "some time ago"
