"""The Flower end of the server: our own loop inside `@app.main()`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_privacy.deploy.plan import ServerPlan
from fl_privacy.errors import LaunchError
from fl_privacy.files import locked

from .loop import Coordinator

ALONE = 60.0  # seconds for the last ServerApp of a run to end

app = ServerApp()
playing: list[Coordinator] = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    home = str(context.run_config["home"])
    try:
        with locked(ServerPlan.lock(Path(home)), wait=ALONE):
            playing.append(Coordinator(grid, ServerPlan.load(home)))
            with stoppable():
                playing[0].play()
    except BlockingIOError:
        raise LaunchError(f"run: another ServerApp of it is still running after {ALONE:g} s; stop it first") from None


@contextmanager
def stoppable() -> Iterator[None]:
    """End by the first signal, and ignore others until the run has stated how far it came; then exit as Flower does.

    Flower sends a second one when its SuperLink is gone, and that would end a process that is exiting.
    """
    if threading.current_thread() is not threading.main_thread():  # a simulation, which has its own way to stop
        yield
        return
    theirs: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for one in theirs:
            signal.signal(one, signal.SIG_IGN)
        stopped.append(number)
        raise SystemExit(f"stopped by {signal.Signals(number).name}")

    for number in theirs:
        signal.signal(number, stop)
    try:
        yield
    finally:
        if stopped:
            theirs[stopped[0]](stopped[0], None)
        for number, handler in theirs.items():
            signal.signal(number, handler)
