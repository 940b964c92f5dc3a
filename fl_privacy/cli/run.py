"""Running a federation, and planning what it will cost."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fl_privacy.errors import FederationError, Interrupted

from .common import INTERRUPTED, Config, DataDir, Init, Json, RunsDir, app, err, interrupt, out, say

if TYPE_CHECKING:
    from fl_privacy.config import Federation
    from fl_privacy.theory.budget import Tier
    from fl_privacy.theory.cost import Cost


class Engine(StrEnum):
    local = "local"
    simulation = "simulation"
    compose = "compose"


@app.command()
def up(
    config: Annotated[
        Path | None, typer.Argument(help="The federation's YAML; not needed with --resume.", show_default=False)
    ] = None,
    engine: Annotated[
        Engine | None, typer.Option(help="Where the sites run; default: local, or where the resumed run ran.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    data_dir: DataDir = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Resume this run; CONFIG may add rounds or a longer deadline.")
    ] = None,
    init: Init = None,
    as_json: Json = False,
) -> None:
    """Run a federation: shows live progress, then the run's folder."""
    from fl_privacy.config import Federation
    from fl_privacy.deploy.running import run

    if init is not None and config is None:
        raise FederationError("init: a resumed run has its own initial model; leave --init out")
    federation = Federation.load(config, data_dir).starting_from(init) if config else None
    signal.signal(signal.SIGTERM, interrupt)
    with resumable():
        result = run(federation, engine and str(engine), runs_dir, data_dir, resume, err if as_json else out)
    if as_json:
        print(result.to_json(), flush=True)
    elif result.status == "completed":
        print_result(result)
    if result.status != "completed":
        raise FederationError(f"run {result.run} failed: {result.reason} (logs: {result.path}/logs)")


@contextmanager
def resumable() -> Iterator[None]:
    """After Ctrl-C, print the command that resumes the run, or that there is nothing to resume."""
    from fl_privacy.ops.status import resume_words

    try:
        yield
    except Interrupted as error:
        words = resume_words(Path(os.path.relpath(error.run_dir)))
        nothing = "the run never started, so there is nothing to resume"
        left = f"resume the run with: {_program()} {words}" if words else nothing
        print(left, file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def print_result(result: Any) -> None:
    from fl_privacy.deploy import ledgers
    from fl_privacy.ops.view import score

    path = os.path.relpath(result.path)
    for row in result.ledgers:
        say(f"ledger {row['site']}: {ledgers.line(row)}")
    if result.reason:
        say(f"stopped early: {result.reason}")
    say(f"\nfinal {score(vars(result))} after {result.rounds} rounds in {result.seconds:.1f} s")
    say(f"the run is in  {path}\nits head is    {result.head}")
    say(f"try next       {_program()} transcript verify {path}")


def _program() -> str:
    """How this shell can call us: by name in an active environment, otherwise by path."""
    active = os.environ.get("VIRTUAL_ENV") == sys.prefix or sys.prefix == sys.base_prefix
    return "fl-privacy" if active else os.path.relpath(Path(sys.executable).with_name("fl-privacy"))


@app.command()
def plan(
    config: Config,
    rate: Annotated[float, typer.Option(metavar="MB/S", help="Rate of every link, in both directions.")] = 20.0,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """What a round costs each party (messages, parameters, bytes), how long it takes, and what it may leak."""
    from fl_privacy.config import Federation
    from fl_privacy.tasks.workload import layout_of
    from fl_privacy.theory.budget import tiers
    from fl_privacy.theory.forecast import forecast

    federation = Federation.load(config, data_dir)
    parameters = layout_of(federation).size
    costs, budgets = federation.route.cost(federation, parameters), tiers(federation)
    once = federation.route.once(federation, parameters)
    space, ahead = federation.route.recombinations(parameters), forecast(federation, parameters, costs, rate * 1e6)
    if as_json:
        found = {"parameters": parameters, "rounds": federation.rounds, "recombination_log10": space, **ahead.to_json()}
        found |= {"per_round": [vars(c) for c in costs], "once": [vars(c) for c in once]}
        found["exchanges"] = federation.route.exchanges
        found["trust"] = [one.model_dump() for one in federation.route.trust(federation)]
        print(json.dumps({**found, "budgets": [vars(b) for b in budgets]}))
        return
    title = f"{federation.name}: {parameters:,} parameters, {federation.rounds} rounds; per round and party"
    table = Table(title=title)
    for column in ("party", "how many", "messages", "parameters in", "parameters out", "MB in", "MB out"):
        table.add_column(column, justify="left" if column == "party" else "right")
    for c in costs:
        sizes = f"{c.parameters_in:,}", f"{c.parameters_out:,}", f"{c.bytes_in / 1e6:,.3f}", f"{c.bytes_out / 1e6:,.3f}"
        table.add_row(c.name, str(c.count), f"{c.messages:g}", *sizes)
    out.print(table)
    whom = ", ".join(federation.route.middleware()) or "every site"
    say(f"exchanges of the server per round, with {whom}: {', '.join(federation.route.exchanges)}")
    _say_once(once)
    _say_seals(costs)
    for line in ahead.lines():
        say(line)
    _say_budgets(federation, budgets)
    for trusted in federation.route.trust(federation):
        say(f"trust: {trusted}")
    if space is not None:
        text = f"an update mixed with {federation.floor - 1} others can be reassembled in 10^{space:,.0f} ways"
        say(f"{text}, which hides it only together with noise")


def _say_once(once: list[Cost]) -> None:
    """What a run moves besides its rounds."""
    moved = [f"{c.name} {c.bytes_in / 1e6:,.3f} in, {c.bytes_out / 1e6:,.3f} out" for c in once if any(c.models)]
    if moved:
        say(f"MB per run for the first and the last model: {'; '.join(moved)}; more if the best is an earlier one")


def _say_seals(costs: list[Cost]) -> None:
    """What of the bytes above is there only so that nobody else can read the others."""
    sealed = [f"{c.name} {c.seals[0]:,} in, {c.seals[1]:,} out" for c in costs if any(c.seals)]
    if sealed:
        say(f"bytes per round that seals add, included above: {'; '.join(sealed)}")


def _say_budgets(federation: Federation, budgets: list[Tier]) -> None:
    """A line per tier, with everything that an epsilon means nothing without."""
    whole = federation.privatise.after_training
    records, task = federation.task.typical_records(len(federation.sites)), federation.task
    known = "" if task.records or not task.guesses_records else ", assumed: set task.records"
    size, what = ("", "an update") if whole else (f"; {records:,} records per site{known}", "a step's gradient")
    for b in budgets:
        each = f"epsilon {b.epsilon:.4g} per round, {b.composed:.4g} after all {federation.rounds} rounds"
        terms = f"(unit: {b.unit}, adjacency: {b.adjacency}, delta: {b.delta:g}{size})"
        warning = "; only one site has this budget, so the label identifies it" if b.sites == 1 else ""
        noise = f"noise of standard deviation {b.scale:.2g} per parameter of {what}"
        say(f"{each} {terms}: {b.sites} site{'s' if b.sites > 1 else ''}, {noise}{warning}")
    if budgets and federation.cohort < len(federation.sites):
        text = f"a round draws {federation.cohort} of {len(federation.sites)} sites"
        say(f"{text}; budgets count all rounds, because a site may be drawn in every one")
