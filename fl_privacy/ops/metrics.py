"""What a role counts of itself. It tells a Prometheus scraper if it is asked to with `--metrics host:port`.

Only then is `fl_privacy.ops.scrape` imported, and prometheus_client with it: a role without metrics does without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_privacy.errors import LaunchError
from fl_privacy.ops.log import Log

LOCAL = "LOCAL"  # in place of a status: the role itself declined, and no call was made


class Metrics:
    """What a role counts; this one forgets it at once, and costs nothing."""

    def ended(self, outcome: str) -> None:
        """A round, or an attempt at one, has ended so."""

    def opened(self, change: int) -> None:
        """That many rounds more are open."""

    def connected(self, change: int) -> None:
        """That many connections more are open."""

    def moved(self, direction: str, count: int) -> None:
        """Bytes of models and updates, `in` or `out`; at the gate, of requests and answers."""

    def seconds(self, phase: str, seconds: float) -> None:
        """A phase took so long."""

    def reject(self, code: str, reason: str) -> None:
        """A request was turned away; of the reason only the field's name counts."""

    def budget(self, spent: float, left: float) -> None:
        """Epsilon spent and left, at the ledger's delta."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is one phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds(name, time.monotonic() - began)


OFF = Metrics()


def operations(parser: argparse.ArgumentParser) -> None:
    """What every role can tell its operator."""
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics here; default: nowhere")
    parser.add_argument("--events", type=Path, metavar="FILE", help="keep the event log here too, rotated by size")


def serve(role: str, name: str, address: str | None, log: Log) -> tuple[Metrics, str]:
    """Metrics on an address of their own, and that address with its port; without one, metrics that count nothing.

    An address that cannot be had is told, and the role does its work without metrics: they are no reason to stop.
    """
    if address is None:
        return OFF, ""
    from fl_privacy.ops.scrape import listen

    try:
        return listen(role, name, address)
    except LaunchError as error:
        log("metrics-failing", reason=str(error))
        return OFF, ""
