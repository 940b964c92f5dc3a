"""What a site has spent, over all runs, and whether it can be charged for this federation at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_privacy.config import Federation
from fl_privacy.errors import LaunchError

if TYPE_CHECKING:
    from fl_privacy.dp.ledger import Charge

LEFT = 0.01  # of `epsilon_total`: whoever has less than this has spent it


def folder(federation: Federation, runs_dir: Path) -> Path:
    """The sites' own folders on this machine. Not of one run: a budget is spent over all runs of a site."""
    return runs_dir / "sites" / federation.name


def reports(federation: Federation, states: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Of the sites whose ledger is on this machine."""
    if federation.unit is None:
        return []
    from fl_privacy.config.policy import ledger_files  # its accountant takes a second to import

    there = {name: state for name, state in states.items() if ledger_files(federation, name, state)[0].is_file()}
    return [found for name, state in there.items() if (found := report(federation, name, state))]


def report(federation: Federation, site: str, state: Path) -> dict[str, Any] | None:
    """From the ledger in a site's own folder; None in a federation without budgets."""
    if federation.unit is None:
        return None
    from fl_privacy.config.policy import open_ledger

    return open_ledger(federation, site, state).report()


def line(found: Mapping[str, Any]) -> str:
    """A report in words."""
    left = "no limit" if found["remaining"] is None else f"{found['remaining']:.3f} left"
    unit = f" (unit: {found['unit']}, adjacency: {found['adjacency']})" if found["charges"] else ""
    return f"epsilon {found['spent']:.3f} spent in {found['charges']} rounds, {left}, delta {found['delta']:g}{unit}"


def projected(federation: Federation, site: str, state: Path, data: Path | None) -> list[str]:
    """What a site has spent, and what a run would add at most at its own number of records."""
    found = report(federation, site, state)
    if found is None:
        return ["no differential privacy: nothing is charged, and nothing bounds what updates reveal"]
    from fl_privacy.dp.ledger import compose

    after = compose(_charges(federation, site, data), found["delta"])
    return [line(found), f"this run: at most epsilon {after:.4g} in {federation.rounds} rounds, without retries"]


def _charges(federation: Federation, site: str, data: Path | None) -> list[Charge]:
    """All of a run: every round, and every evaluation with noise; the last model is evaluated once more."""
    from fl_privacy.config.evaluate import charge_of

    training = federation.privatise.charge(federation, federation.site(site).budget or 0.0)
    if training is None:  # a site's number of records decides
        from fl_privacy.steps.base import Seat
        from fl_privacy.tasks.workload import Workload

        work = Workload(federation, data)
        training = federation.privatise.start(Seat(federation, site, work, len(work.site_data(site)), None)).charge
    evaluation, evaluations = charge_of(federation), -(-federation.rounds // federation.evaluate.every) + 1
    times = ((training, federation.rounds), (evaluation, evaluations))
    return [charge for charge, count in times if charge is not None for _ in range(count)]


def check(federation: Federation, sites: Path) -> None:
    """Refuse a new run if too few sites on this machine have anything left of their `epsilon_total`."""
    spent = 0
    for site in federation.sites:
        if site.epsilon_total is None or not _was_there(federation, site.name, sites / site.name):
            continue
        found = report(federation, site.name, sites / site.name)
        spent += found is not None and found["remaining"] < LEFT * site.epsilon_total
        if len(federation.sites) - spent < federation.quorum:
            raise LaunchError(
                f"sites.epsilon_total: {site.name!r} has spent its {site.epsilon_total:g} in earlier runs (ledgers in "
                f"{sites}), and a round needs {federation.quorum} sites; raise epsilon_total, or use another "
                "--runs-dir for an unrelated experiment"
            )


def check_unit(federation: Federation, site: str, state: Path) -> None:
    """Raise if the site's ledger is missing, or protects another unit: then its rounds cannot be added up."""
    if federation.unit is None or not _was_there(federation, site, state):
        return
    from fl_privacy.config.policy import open_ledger

    open_ledger(federation, site, state).check_unit(federation.unit, str(federation.privatise.adjacency))


def _was_there(federation: Federation, site: str, state: Path) -> bool:
    """Whether the site has a ledger, or had one."""
    from fl_privacy.config.policy import ledger_files

    return any(file.exists() for file in ledger_files(federation, site, state))
