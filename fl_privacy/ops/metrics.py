"""What a role counts. `--metrics host:port` serves it to a Prometheus scraper.

Only then are `fl_privacy.ops.scrape` and prometheus_client imported: a role without metrics does not need them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_privacy.errors import LaunchError
from fl_privacy.ops.log import Log

LOCAL = "LOCAL"  # instead of a gRPC status: the role itself declined, without a call


class Metrics:
    """What a role counts; this class discards it and costs nothing."""

    def ended(self, outcome: str) -> None:
        """A round, or an attempt at one, ended with this outcome."""

    def opened(self, change: int) -> None:
        """The number of open rounds changed."""

    def connected(self, change: int) -> None:
        """The number of open connections changed."""

    def moved(self, direction: str, count: int) -> None:
        """Bytes of models and updates, `in` or `out`; at the gate, of requests and answers."""

    def seconds(self, phase: str, seconds: float) -> None:
        """A phase took so long."""

    def reject(self, code: str, reason: str) -> None:
        """A request was refused; only the field that the reason names is counted."""

    def budget(self, spent: float, left: float) -> None:
        """Epsilon spent and left, at the ledger's delta."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as one phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds(name, time.monotonic() - began)


OFF = Metrics()


def operations(parser: argparse.ArgumentParser) -> None:
    """Options of every role: metrics and an event log for its operator."""
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics here; default: nowhere")
    parser.add_argument("--events", type=Path, metavar="FILE", help="keep the event log here too, rotated by size")


def serve(role: str, name: str, address: str | None, log: Log) -> tuple[Metrics, str]:
    """Serve metrics on an address; returns them and the address with its port. Without one, they count nothing.

    If the address is not available, that is logged, and the role works without metrics.
    """
    if address is None:
        return OFF, ""
    from fl_privacy.ops.scrape import listen

    try:
        return listen(role, name, address)
    except LaunchError as error:
        log("metrics-failing", reason=str(error))
        return OFF, ""
