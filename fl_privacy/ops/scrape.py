"""What a Prometheus scraper sees: totals and times with labels from fixed sets, and nothing about who sent what."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any

from fl_privacy.addresses import LOOPBACK, parse, show
from fl_privacy.errors import LaunchError
from fl_privacy.ops.metrics import LOCAL, Metrics
from fl_privacy.roles import ROLES

SLOTS = 8  # scrapes at a time
PATIENCE = 10.0  # seconds that one scrape may take
BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)
OTHER = "other"
# fmt: off
CODES = frozenset((
    LOCAL, "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
))
FIELDS = frozenset((
    "aggregator", "attempt", "best", "budget", "certificate", "charge", "cohort", "counts", "data", "deadline",
    "digest", "dtype", "evaluation", "evaluator", "farewell", "floor", "layers", "layout", "ledger", "length", "mixing",
    "model", "peer", "policy", "quorum", "roster", "round", "run", "seed", "server", "settle", "shuffler", "site",
    "sites", "state", "stream", "superlink", "superseded", "ticket", "tier", "training",
    # at the gate: why a caller was refused
    "connections", "early", "expired", "foreign", "handshake", "request", "revoked", "role",
))
# fmt: on


class Prometheus(Metrics):
    """Counts in a registry of its own: nothing about the process but what is listed here."""

    def __init__(self, role: str, name: str) -> None:
        import prometheus_client as client

        client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = client.CollectorRegistry()
        self._latest = client.generate_latest
        here: Any = {"registry": self.registry, "namespace": "fl_privacy"}
        info = client.Gauge("build_info", "Version and role of this process", ("role", "name", "version"), **here)
        info.labels(role, name, version("fl-privacy")).set(1)
        self._rounds = client.Counter("rounds", "Attempts at rounds, by how they ended", ("outcome",), **here)
        for outcome in ROLES[role].outcomes:
            self._rounds.labels(outcome)
        self._bytes = client.Counter("bytes", "Bytes of models and updates", ("direction",), **here)
        for direction in ("in", "out"):
            self._bytes.labels(direction)
        self._seconds = client.Histogram("phase_seconds", "Time spent, by phase", ("phase",), buckets=BUCKETS, **here)
        self._rejects = client.Counter("rejects", "Requests refused", ("code", "field"), **here)
        self._open: Any = None
        if "rounds" in ROLES[role].gauges:
            self._open = client.Gauge("open_rounds", "Attempts at rounds that are open", **here)
        self._connections: tuple[Any, Any] | None = None
        if "connections" in ROLES[role].gauges:
            self._connections = (
                client.Gauge("open_connections", "Connections that are open", **here),
                client.Counter("connections", "Connections that were accepted", **here),
            )
        self._budget: tuple[Any, Any] | None = None
        if "budget" in ROLES[role].gauges:
            self._budget = (
                client.Gauge("epsilon_spent", "Privacy budget spent over all runs", **here),
                client.Gauge("epsilon_left", "Privacy budget left under the site's policy and epsilon_total", **here),
            )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._latest(self.registry)

    def ended(self, outcome: str) -> None:
        self._rounds.labels(outcome).inc()

    def opened(self, change: int) -> None:
        self._open.inc(change)

    def connected(self, change: int) -> None:
        assert self._connections is not None
        self._connections[0].inc(change)
        if change > 0:
            self._connections[1].inc(change)

    def moved(self, direction: str, count: int) -> None:
        self._bytes.labels(direction).inc(count)

    def seconds(self, phase: str, seconds: float) -> None:
        self._seconds.labels(phase).observe(seconds)

    def reject(self, code: str, reason: str) -> None:
        self._rejects.labels(code if code in CODES else OTHER, field_of(reason)).inc()

    def budget(self, spent: float, left: float) -> None:
        assert self._budget is not None
        self._budget[0].set(spent)
        self._budget[1].set(left)


def field_of(reason: str) -> str:
    """The first word of a reason if it is one of ours: a peer's text never becomes a label."""
    word = re.match(r"[a-z]+", reason)
    return word[0] if word and word[0] in FIELDS else OTHER


def listen(role: str, name: str, address: str) -> tuple[Metrics, str]:
    """Serve metrics until the process ends; returns them and the address with its port."""
    host, port = _where(address)
    metrics = Prometheus(role, name)
    try:
        listener = _Listener((host, port), metrics)
    except (OSError, OverflowError):
        raise LaunchError(
            f"metrics {address}: in use, or not an address of this machine; choose another (`metrics` in kit.yaml)"
        ) from None
    threading.Thread(target=listener.serve_forever, name="metrics", daemon=True).start()
    return metrics, show(host, listener.server_address[1])


def _where(text: str) -> tuple[str, int]:
    """`host:port`; a port alone means the loopback interface."""
    port = text.removeprefix(":")
    try:
        return parse(text if ":" in port else f"{LOOPBACK}:{port}")
    except LaunchError:
        raise LaunchError(f"metrics {text}: not host:port; use {LOOPBACK}:9464") from None


class _Listener(ThreadingHTTPServer):
    """Serves a few scrapes at a time, each for a limited time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], metrics: Prometheus) -> None:
        self.metrics = metrics
        self._slots = threading.BoundedSemaphore(SLOTS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Scrape)

    def server_bind(self) -> None:
        """Bind without the host name lookup of the base class."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        cut = threading.Timer(PATIENCE, _cut, (request,))
        cut.daemon = True
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that disconnects is not worth logging."""


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Scrape(BaseHTTPRequestHandler):
    """GET /metrics, and nothing else."""

    server: _Listener
    server_version, sys_version = "fl-privacy", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.metrics.text()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not events."""
