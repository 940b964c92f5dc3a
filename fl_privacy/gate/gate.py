"""`python -m fl_privacy.gate.gate`: stands in front of a SuperLink, whose control API has no authentication.

Mutual TLS identifies the caller. A site can use the Fleet API only, the server can use everything.
"""

from __future__ import annotations

import socket
import ssl
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

from cryptography import x509

from fl_privacy.addresses import is_loopback, parse
from fl_privacy.errors import FederationError, LaunchError, ProtocolError
from fl_privacy.gate.forward import Away, Caller, Gone, Refused, Upstream, check, forward
from fl_privacy.gate.listener import Arguments, Handshakes, Stream, accept_tls, close, listen, run, serve
from fl_privacy.identity import tls
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.identity.watched import Watched
from fl_privacy.ops.log import Log
from fl_privacy.ops.metrics import OFF, Metrics, operations, serve as serve_metrics
from fl_privacy.roles import ROLES

CONNECTIONS = 2048
CONNECTIONS_OF_ONE = 64
HANDSHAKES = 512  # at once; and from one address:
HANDSHAKES_OF_ONE = 64
AGE = 300.0  # then a caller must reconnect, with its renewed certificate
REPEAT = 60.0
REMEMBERED = 1024
UNKNOWN, FORBIDDEN, MANY, WRONG = "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"
GREETING = (b"GET", b"/")
STATUSES = {403: FORBIDDEN, 413: MANY}
EARLY, EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED


class Refusals:
    """Logs the event `refused` at most once a minute for the same caller and reason; metrics count all of them."""

    def __init__(self, log: Log, metrics: Metrics) -> None:
        self._log, self._metrics = log, metrics
        self._last: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def __call__(self, code: str, field: str, reason: str, caller: str, identity: Identity | None = None) -> None:
        self._metrics.reject(code, field)
        key = (reason, identity.uri if identity else caller)
        at, more = self._last.get(key, (-REPEAT, 0))
        now = time.monotonic()
        if now - at < REPEAT:
            self._last[key] = (at, more + 1)
            return
        fields: dict[str, Any] = {"identity": identity.uri} if identity else {}
        fields |= {"more_before": more} if more else {}
        self._log.rate_limited("refused", reason=reason, caller=caller, **fields)
        self._last[key] = (now, 0)
        self._last.move_to_end(key)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)


class Gate:
    """Accepts connections, identifies the callers, and forwards the requests that they may send."""

    def __init__(
        self,
        superlink: tuple[str, int],
        authority: Path,
        keys: Keyring,
        federation: str,
        log: Log,
        metrics: Metrics = OFF,
    ) -> None:
        self._superlink, self._keys, self._federation = superlink, keys, federation
        self._log, self._metrics = log, metrics
        own = tls.files(keys)
        self._server = Watched(own, lambda: tls.server_context(*own))
        self._client = Watched((authority,), lambda: tls.client_context(authority))
        self._refused = Refusals(log, metrics)
        self._handshakes = Handshakes(HANDSHAKES_OF_ONE, HANDSHAKES)
        self._open: Counter[Identity] = Counter()
        self._known: set[Identity] = set()
        self._reachable: bool | None = None

    async def handle(self, sock: socket.socket, caller: str) -> None:
        """Serve one accepted connection until it ends."""
        try:
            async with self._handshakes.one(caller):
                stream = await accept_tls(sock, self._server.get())
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or error
            self._refused(UNKNOWN, _fault(error), f"TLS: {why}", caller)
            return
        except TimeoutError:
            self._refused(MANY, "handshake", "too many handshakes at once", caller)
            return
        except OSError:  # a probe, or a caller that left
            return
        try:
            await self._serve(stream, caller)
        finally:
            await close(stream[1])

    async def _serve(self, stream: Stream, caller: str) -> None:
        identity, calls = None, Caller(stream, self._metrics)
        field = "certificate"
        try:
            certificate = tls.peer_certificate(stream[1])
            identity = Identity.of(certificate)
            field = "foreign"
            self._admit(identity)
            field = "revoked"
            self._keys.refuse_revoked(certificate)
            field = "roster"
            self._keys.refuse_unlisted(certificate)
        except Refused as refused:
            self._refused(FORBIDDEN, "role", str(refused), caller, identity)
            await calls.refuse(refused)  # the answer has a date, with which `preflight` compares clocks
            return
        except (FederationError, ValueError) as error:
            self._refused(FORBIDDEN, field, str(error), caller, identity)
            return
        if self._open[identity] >= CONNECTIONS_OF_ONE or self._open.total() >= CONNECTIONS:
            self._refused(MANY, "connections", "too many connections at once", caller, identity)
            stream[1].transport.abort()  # until a silent caller has said goodbye, it would hold its buffers
            return
        self._open[identity] += 1
        self._metrics.connected(1)
        if identity not in self._known:
            self._known.add(identity)
            self._log("joined", identity=identity.uri, caller=caller)
        try:
            await self._requests(calls, identity, certificate, caller)
        finally:
            self._open[identity] -= 1
            self._metrics.connected(-1)

    def _admit(self, identity: Identity) -> None:
        if identity.federation != self._federation:
            raise ProtocolError("PERMISSION_DENIED", f"certificate: belongs to federation {identity.federation!r}")
        if not ROLES[identity.role].apis:
            raise Refused(403, f"certificate: a {identity.role} may not use the SuperLink")

    async def _requests(self, calls: Caller, identity: Identity, certificate: x509.Certificate, caller: str) -> None:
        upstream: Upstream | None = None
        born, field = time.monotonic(), "revoked"
        try:
            while (request := await calls.request()) is not None:
                field = "revoked"
                self._keys.refuse_revoked(certificate)
                field = "roster"
                self._keys.refuse_unlisted(certificate)
                if (request.method, request.target) == GREETING:
                    await calls.refuse(Refused(403, "not found"))  # the answer has a date, which `preflight` asks for
                    return
                check(request, identity.role)
                if upstream is None or not upstream.usable:
                    if upstream is not None:
                        upstream.close()
                    upstream = await self._dial()
                await forward(calls, upstream, request, last=time.monotonic() - born > AGE)
                if not calls.next():
                    return
        except Refused as refused:
            self._refused(STATUSES.get(refused.status, WRONG), "request", str(refused), caller, identity)
            await calls.refuse(refused)
        except FederationError as error:
            self._refused(FORBIDDEN, field, str(error), caller, identity)
        except Away as away:
            self._saw(False, str(away))
            await calls.refuse(Refused(503, "the SuperLink is unreachable"))
        except Gone:
            return
        finally:
            if upstream is not None:
                upstream.close()

    async def _dial(self) -> Upstream:
        upstream = await Upstream.open(*self._superlink, self._client.get())
        self._saw(True)
        return upstream

    def _saw(self, reachable: bool, reason: str = "") -> None:
        """Log once when the SuperLink becomes reachable or unreachable."""
        if reachable != self._reachable:
            self._reachable = reachable
            self._log("connected") if reachable else self._log("unreachable", reason=f"SuperLink: {reason}")


def _fault(error: ssl.SSLError) -> str:
    """Why a handshake failed, as one of a few words."""
    code = getattr(error, "verify_code", 0)
    return {0: "handshake", EARLY: "early", EXPIRED: "expired"}.get(code, "foreign")


async def main(log: Log) -> None:
    parser = Arguments(prog="fl_privacy.gate.gate", description="The gate in front of a SuperLink")
    parser.add_argument("--listen", required=True, help="HOST:PORT; port 0 picks a free port and logs it")
    parser.add_argument("--superlink", required=True, help="HOST:PORT of the SuperLink, on loopback")
    parser.add_argument("--superlink-ca", type=Path, required=True, help="PEM file with the SuperLink's certificate")
    parser.add_argument("--keys", type=Path, required=True, help="folder with key.pem, cert.pem and ca.pem")
    parser.add_argument("--federation", required=True, help="callers of other federations are refused")
    operations(parser)
    options = parser.parse_args()
    log.keep(options.events)
    superlink = parse(options.superlink)
    if not is_loopback(superlink[0]):
        raise LaunchError(f"superlink {options.superlink}: must be on loopback; else callers could bypass the gate")
    keys = Keyring(options.keys)
    own = tls.own_identity(keys)
    if own.federation != options.federation or not ROLES[own.role].has_gate:
        raise LaunchError(f"keys {keys.folder}: belong to {own.uri}, not to the superlink of {options.federation!r}")
    metrics, scraped = serve_metrics(own.role, own.name, options.metrics, log)
    if scraped:
        log("metrics", address=scraped)
    gate = Gate(superlink, options.superlink_ca, keys, options.federation, log, metrics)
    await serve(listen(*parse(options.listen)), gate.handle, log)


if __name__ == "__main__":
    sys.exit(run("gate", main))
