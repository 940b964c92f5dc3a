"""`python -m client_app.worker`: the long-lived process of one site, behind a Unix socket for its own ClientApp."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from pydantic import ValidationError

from fl_privacy.config import Federation
from fl_privacy.config.policy import policy_file
from fl_privacy.errors import FederationError, ProtocolError, reason_of, require
from fl_privacy.identity.keyring import Keyring, accepted_roster
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import LOCAL, operations, serve as serve_metrics
from fl_privacy.routes.base import check_engine
from fl_privacy.routes.ends import Ticket
from fl_privacy.tasks import accepted
from fl_privacy.wire.buffers import keep_buffers
from fl_privacy.wire.client import explain
from fl_privacy.wire.stream import data_bytes

from .own_policy import OwnPolicy
from .site import Site
from .tickets import ABSTAIN, Desk, Reply


def main() -> int:
    options = _arguments().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keep_buffers()
    log = Log(options.site)
    try:
        log.keep(options.events)
        metrics, address = serve_metrics("site", options.site, options.metrics, log)
        federation = Federation.load(options.config)
        check_engine(federation.route, "a worker process")
        policy_file(federation, options.site, options.state, options.trial)
        policy = OwnPolicy(federation, options.site, options.state, log)
        accepted.check(federation, options.state, policy.code)
        keys, folders = Keyring(options.keys, options.state), (options.data_dir, options.truth, options.state)
        keys.read()  # a key that others could read stops the start, and not only the first connection
        roster = accepted_roster(keys, options.state)
        log("roster", serial=roster.serial, digest=roster.digest)
        facts: dict[str, Any] = {"log": log, "metrics": metrics, "policy": policy}
        site = Site(federation, options.site, keys, options.middleware, *folders, **facts)
        if address:
            site.budget()
            log("metrics", address=address)
        listener = listen(options.socket)
        site.log("listening", address=str(options.socket))
        serve(listener, site)
    except FederationError as error:
        log("error", reason=str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit:
        log("stopped")
        raise
    return 0


def listen(path: Path) -> socket.socket:
    """The socket is the worker's own: owner and group may connect, nobody else."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def serve(listener: socket.socket, site: Site) -> None:
    """One ticket at a time: a site has one model in memory."""
    desk = Desk(listener, site.largest_model, site.log)
    while True:
        asked = desk.next()
        asked.answer(answer(site, asked.fields, asked.payload))


def answer(site: Site, fields: dict[str, Any], payload: bytearray) -> Reply:
    """Do what the ticket asks; the reply is done or abstain, whatever the reason, which goes only to our own log."""
    asked: dict[str, Any] = {}
    try:
        ticket = _ticket(fields)
        asked = {"run": ticket.run, "first": ticket.first, "last": ticket.last}
        require(len(payload) % 4 == 0, "model: not a whole number of float32 values")
        model = np.frombuffer(payload, "<f4").astype(np.float32) if payload else None
        rounds, update = site.take_part(ticket, model)
        site.log("done", **asked, rounds=rounds)
        return {"status": "done" if rounds else ABSTAIN}, b"" if update is None else data_bytes(update)
    except ProtocolError as error:
        site.metrics.reject(error.code, str(error))
        site.log("refused", **asked, code=error.code, reason=str(error))
    except grpc.RpcError as error:
        site.metrics.ended("failed")
        site.metrics.reject(error.code().name, str(error.details()))
        site.log("failed", **asked, code=error.code().name, reason=explain(error))
    except Exception as error:  # the worker has other tickets to answer
        site.metrics.reject(LOCAL, reason_of(error))
        site.log("failed", **asked, reason=reason_of(error))
    return {"status": ABSTAIN}, b""


def _ticket(fields: dict[str, Any]) -> Ticket:
    try:
        return Ticket.model_validate(fields)
    except ValidationError as error:
        raise ProtocolError("INVALID_ARGUMENT", f"ticket: {error.error_count()} fields are wrong") from None


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The worker of one site")
    parser.add_argument("--config", type=Path, required=True, help="the federation's YAML, this site's own copy")
    parser.add_argument("--site", required=True, help="this site's name in it")
    parser.add_argument("--keys", type=Path, required=True, help="folder with key.pem, cert.pem and ca.pem")
    parser.add_argument("--middleware", nargs="*", default=[], help="host:port of the shuffler, or of each aggregator")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket for the ClientApp")
    parser.add_argument("--data-dir", type=Path, help="data folder; default: FL_PRIVACY_DATA")
    parser.add_argument("--state", type=Path, help="this site's own folder: ledger and outgoing update")
    trial = "one person runs all sites of the federation, so that this one may have no policy"
    parser.add_argument("--trial", action="store_true", help=trial)
    truth = "where to record true updates, with `audit: true`; {run} is the run's name"
    parser.add_argument("--truth", type=Path, help=truth)
    operations(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
