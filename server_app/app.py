"""The Flower end of the server: our own loop inside `@app.main()`."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_privacy.deploy.plan import ServerPlan

from .loop import Coordinator

app = ServerApp()
playing: list[Coordinator] = []


@app.main()
def main(grid: Grid, context: Context) -> None:
    playing.append(Coordinator(grid, ServerPlan.load(str(context.run_config["home"]))))
    playing[0].play()
