"""`python -m client_app.forks`: a simulation's ServerApp in this process, its sites in forks of it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.server.superlink.fleet.vce.backend import Backend

from fl_privacy.deploy import flower
from fl_privacy.deploy.parent import die_with_parent
from fl_privacy.errors import FederationError
from fl_privacy.ops.log import Log

from . import simulated
from .app import app


class Forks(Backend):
    """A pool of forks in which Flower's Simulation Runtime runs the ClientApp.

    They share the code and data that this process has loaded, while each of Ray's actors would load its own. They are
    made before the first thread starts: a fork inherits locks held by other threads, which nobody would release.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ProcessPoolExecutor(count, get_context("fork"), initializer=_begin)
        self._pool.submit(os.getpid).result()

    @property
    def num_workers(self) -> int:
        return self._count

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        """Nothing to do: the forks have the ClientApp."""

    def is_worker_idle(self) -> bool:
        return True

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        return self._pool.submit(_answer, message, context).result()

    def terminate(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _answer(message: Message, context: Context) -> tuple[Message, Context]:
    return app(message=message, context=context), context


def _begin() -> None:
    """In a fork: it has no run to state anything about."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()


def _stop(*_: object) -> None:
    """The ServerApp is in a thread, which no signal reaches. A second signal must not interrupt this."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for coordinator in getattr(sys.modules.get("server_app.app"), "playing", ()):
        coordinator.interrupt()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description="A simulated federation")
    parser.add_argument("--home", required=True, help="folder with server.json and simulation.json")
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True, help="how many sites are active at a time")
    options = parser.parse_args()
    try:
        signal.signal(signal.SIGTERM, _stop)
        for module in simulated.workload(options.home).federation.privatise.imports:
            import_module(module)  # once, and not in every fork
        flower.simulate({"home": options.home}, options.sites, Forks(options.processes))
    except FederationError as error:
        Log("simulation")("error", reason=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
