"""The Flower end of the server: our own loop inside `@app.main()`."""

from __future__ import annotations

from pathlib import Path

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
            playing[0].play()
    except BlockingIOError:
        raise LaunchError(f"run: another ServerApp of it is still running after {ALONE:g} s; stop it first") from None
