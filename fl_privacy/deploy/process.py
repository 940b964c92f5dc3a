"""How a middleware process starts and stops: arguments, listening, a clean exit on a signal."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fl_privacy.addresses import host_of, show
from fl_privacy.config import Federation
from fl_privacy.errors import FederationError
from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import operations, serve as serve_metrics
from fl_privacy.routes.base import check_party
from fl_privacy.transcript.recorder import RunRecorder
from fl_privacy.wire import rpc
from fl_privacy.wire.buffers import keep_buffers

STOP_GRACE = 2.0


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="the federation's YAML")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 picks a free port and logs it")
    parser.add_argument("--keys", type=Path, required=True, help="folder with key.pem, cert.pem and ca.pem")
    parser.add_argument("--view", type=Path, help="where to record views, with `audit: true`; {run} is the run")
    operations(parser)
    return parser


def middleware_arguments(description: str) -> argparse.ArgumentParser:
    """Those of a party that opens and releases rounds."""
    parser = arguments(description)
    parser.add_argument("--state", type=Path, required=True, help="folder for what must outlive this process")
    return parser


def recorder(options: argparse.Namespace, federation: Federation, observer: str) -> RunRecorder | None:
    """The recorder of this party's own views; none unless the federation is audited."""
    if not federation.audit or options.view is None:
        return None
    return RunRecorder(options.view, observer, Keyring(options.keys))


def run(service: str, make: Callable[[Federation], Any], options: argparse.Namespace, log: Log) -> int:
    """Read the federation, make the servicer and serve; returns the exit code."""
    try:
        log.keep(options.events)
        federation = Federation.load(options.config)
        check_party(federation.route, log.role)
        servicer = make(federation)
        servicer.log = log
        servicer.metrics, address = serve_metrics(log.role.partition("-")[0], log.role, options.metrics, log)
        if address:
            log("metrics", address=address)
        asyncio.run(serve(service, servicer, options, log, len(federation.sites)))
    except FederationError as error:
        log("error", reason=str(error))
        return 2
    return 0


async def serve(name: str, servicer: Any, options: argparse.Namespace, log: Log, sites: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    keep_buffers()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    keys, refused = Keyring(options.keys), getattr(servicer, "refused", None)
    server, port = await rpc.serve(name, servicer, options.listen, keys, refused, sites)
    log("listening", address=show(host_of(options.listen), port))
    await stop.wait()
    await server.stop(STOP_GRACE)
    log("stopped")
