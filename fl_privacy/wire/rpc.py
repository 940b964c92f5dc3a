"""The two services as tables, and servers and channels for them: limits, keepalive, health, statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from fl_privacy.errors import FederationError, LaunchError, ProtocolError, require
from fl_privacy.identity.keyring import Identity, Keyring, Renewing, belong_together, certificate_of
from fl_privacy.wire import federation_pb2 as pb, limits, stream
from fl_privacy.wire.channel import Channel

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]
Raiser = Callable[[ProtocolError], Any]
Handler = Callable[[Any, Any], Any]

_CHUNK: Codec = (stream.encode, stream.decode)


def _message(kind: Any) -> Codec:
    return kind.SerializeToString, kind.FromString


def _received(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Bytes that are no message become a value that can be refused: gRPC would log a traceback for each."""

    def read(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return stream.Malformed()

    return read


# method -> (gRPC's name for what streams, request, reply)
MIDDLEWARE: dict[str, tuple[str, Codec, Codec]] = {
    "Open": ("stream_unary", _CHUNK, _message(pb.Empty)),
    "Submit": ("stream_unary", _CHUNK, _message(pb.SubmitReply)),
    "Collect": ("unary_stream", _message(pb.CollectRequest), _CHUNK),
    "Fetch": ("unary_stream", _message(pb.FetchRequest), _CHUNK),
    "Abstain": ("unary_unary", _message(pb.AbstainRequest), _message(pb.Empty)),
    "Settle": ("unary_unary", _message(pb.SettleRequest), _message(pb.SettleReply)),
    "Shard": ("unary_unary", _message(pb.ShardRequest), _message(pb.ShardReply)),
    "Seed": ("stream_unary", _CHUNK, _message(pb.Empty)),
    "Finish": ("unary_unary", _message(pb.FinishRequest), _message(pb.FinishReply)),
    "Post": ("unary_unary", _message(pb.Letter), _message(pb.Empty)),
    "Pickup": ("unary_unary", _message(pb.PickupRequest), _message(pb.Letters)),
    "Report": ("unary_unary", _message(pb.ReportRequest), _message(pb.Empty)),
    "Share": ("stream_unary", _CHUNK, _message(pb.Empty)),
    "Check": ("unary_unary", _message(pb.CheckRequest), _message(pb.CheckReply)),
    "Relay": ("stream_unary", _CHUNK, _message(pb.Empty)),
}
EVALUATOR = {"Evaluate": ("unary_unary", _message(pb.EvaluateRequest), _message(pb.EvaluateReply))}
HEALTH = "grpc.health.v1.Health"
CHECKS = {"Check": ("unary_unary", _message(health_pb2.HealthCheckRequest), _message(health_pb2.HealthCheckResponse))}
SERVICES = {"fl_privacy.wire.Middleware": MIDDLEWARE, "fl_privacy.wire.Evaluator": EVALUATOR, HEALTH: CHECKS}

# A dead peer is noticed within half a minute, also behind a NAT that forgets idle connections.
CHANNEL_OPTIONS = [
    *limits.MESSAGES,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
SERVER_OPTIONS = [
    *limits.MESSAGES,
    *limits.OPTIONS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Otherwise an idle client's keepalive counts as abuse, and its connection is closed after the third ping.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True)
class Door:
    """What every call passes first: its caller's certificate is not revoked, and it has not too many calls running.

    Requests are streams here even where they are one message: then a call is admitted before its message is read.
    """

    keys: Keyring
    refused: Raiser | None = None
    callers: limits.Callers = field(default_factory=limits.Callers)

    def answer(self, call: Callable[[Any, Any], Awaitable[Any]], whole: bool) -> Handler:
        """A handler that gives one reply; `whole`: to one message, which `call` gets instead of the stream."""

        async def handler(_: Any, context: Any) -> Any:
            parts = limits.Parts(context)
            try:
                with self._admit(context):
                    return await call(await limits.request_of(parts) if whole else parts, context)
            except FederationError as error:
                await self._refuse(context, error)

        return handler

    def stream(self, call: Callable[[Any, Any], AsyncIterator[Any]]) -> Handler:
        """A handler that gives a stream to one message."""

        async def handler(_: Any, context: Any) -> AsyncIterator[Any]:
            try:
                with self._admit(context):
                    async for part in call(await limits.request_of(limits.Parts(context)), context):
                        yield part
            except FederationError as error:
                await self._refuse(context, error)

        return handler

    def _admit(self, context: Any) -> AbstractContextManager[None]:
        """Checked for every call: a connection may be older than a revocation or a roster."""
        certificate = certificate_of(context)
        self.keys.admit(certificate)
        return self.callers.admit(certificate)

    async def _refuse(self, context: Any, error: FederationError) -> None:
        # The frames of a refused call hold its messages, and gRPC keeps the error that it raises here with the call:
        # free them now, not when the garbage collector runs.
        error.__traceback__ = error.__context__ = None
        code = error.code if isinstance(error, ProtocolError) else "INTERNAL"
        if isinstance(error, ProtocolError) and self.refused is not None:
            self.refused(error)
        try:
            await context.abort(getattr(grpc.StatusCode, code), str(error))
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None


def handlers(name: str, servicer: Any, door: Door) -> grpc.GenericRpcHandler:
    """The gRPC handlers of a service, from a servicer's methods of the same names in lower case."""
    made = {}
    for method, (streams, request, reply) in SERVICES[name].items():
        call, read = getattr(servicer, method.lower()), _received(request[1])
        if streams == "unary_stream":
            made[method] = grpc.stream_stream_rpc_method_handler(door.stream(call), read, reply[0])
        else:
            answer = door.answer(call, whole=streams == "unary_unary")
            made[method] = grpc.stream_unary_rpc_method_handler(answer, read, reply[0])
    return grpc.method_handlers_generic_handler(name, made)


class Health:
    """gRPC's own health service: a process that answers serves."""

    def __init__(self, service: str) -> None:
        self._services = ("", service)

    async def check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        require(request.service in self._services, "service: unknown here", "NOT_FOUND")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class Stub:
    """A client of one service: `stub.fetch(request, timeout=...)`."""

    def __init__(self, channel: Channel, name: str) -> None:
        for method, (streams, request, reply) in SERVICES[name].items():
            setattr(self, method.lower(), getattr(channel, streams)(f"/{name}/{method}", request[0], reply[1]))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def middleware(channel: Channel) -> Stub:
    return Stub(channel, "fl_privacy.wire.Middleware")


def evaluator(channel: Channel) -> Stub:
    return Stub(channel, "fl_privacy.wire.Evaluator")


def channel(address: str, keys: Keyring, whom: Identity) -> Channel:
    """A mutual-TLS channel to a party at `host:port`, with whatever certificate is in `keys` at the time of a call."""
    return Channel(address, keys, whom, CHANNEL_OPTIONS)


def server_credentials(keys: Keyring) -> grpc.ServerCredentials:
    """Mutual TLS: a caller without a certificate of our authority fails the handshake.

    The files are checked for every new connection, so a renewed certificate needs no restart.
    """
    files = Renewing(keys)
    if not belong_together(*files.contents):
        raise LaunchError(f"certificates: {keys.folder}: key.pem, cert.pem and ca.pem do not belong together")

    def configuration() -> Any:
        key, certificate, authority = files.contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def renewed() -> Any:
        return configuration() if files.changed() else None

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, require_client_authentication=True)


async def serve(
    name: str, servicer: Any, address: str, keys: Keyring, refused: Raiser | None = None, sites: int = 0
) -> Any:
    """Start a mutual-TLS server of one service, for so many sites, with gRPC health; returns (server, port)."""
    server, door = grpc.aio.server(options=[*SERVER_OPTIONS, limits.connections(sites)]), Door(keys, refused)
    server.add_generic_rpc_handlers((handlers(name, servicer, door), handlers(HEALTH, Health(name), door)))
    try:
        port = server.add_secure_port(address, server_credentials(keys))
    except RuntimeError:
        port = 0
    if port == 0:
        raise LaunchError(f"listen {address}: the address is in use or not on this machine; choose another port")
    await server.start()
    return server, port
