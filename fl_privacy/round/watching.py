"""Seeing a round out: its deadline, what is counted when it is over, and how it ended."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import Metrics
from fl_privacy.round.attempt import Attempt

KEPT = 600.0  # seconds that a closed round waits for the server after its deadline; then its updates are dropped


async def watch(attempt: Attempt, metrics: Metrics, log: Log) -> None:
    """Until the attempt is over and its updates are gone."""
    try:
        await _see_out(attempt, metrics)
    except asyncio.CancelledError:
        attempt.round.fail("the process was stopped")
        raise
    finally:
        _ended(attempt, metrics, log)


async def _see_out(attempt: Attempt, metrics: Metrics) -> None:
    """Wait for the round's end; drop the updates of a closed round that nobody collects."""
    while not attempt.over.is_set():
        attempt.round.tick(time.monotonic())
        attempt.notice()
        with suppress(TimeoutError):
            async with asyncio.timeout(attempt.round.remaining(time.monotonic()) + 0.001):
                await attempt.over.wait()
    _account(attempt, metrics)
    try:
        # From the deadline on: until then another aggregator may still be collecting the same round.
        async with asyncio.timeout(attempt.round.remaining(time.monotonic()) + KEPT):
            await attempt.gone.wait()
    except TimeoutError:
        attempt.fail("nobody collected it in time")


def _account(attempt: Attempt, metrics: Metrics) -> None:
    """Bytes and times of a round that is over. Not before: a scraper must not see updates arrive one by one."""
    now, opened = time.monotonic(), attempt.round.opened_at
    first = attempt.first_at or now
    metrics.opened(-1)
    metrics.seconds("waiting", first - opened)
    metrics.seconds("receiving", now - first)
    metrics.moved("in", attempt.taken)
    metrics.moved("out", attempt.given)


def _ended(attempt: Attempt, metrics: Metrics, log: Log) -> None:
    """Count how it ended; log why it was not released, if so."""
    round = attempt.round
    metrics.ended("released" if attempt.delivered else "failed")
    if not attempt.delivered:
        reason = round.reason or "it broke off while it was being released"
        log("not-released", **round.spec.where, count=len(round.accepted), floor=round.least, reason=reason)
