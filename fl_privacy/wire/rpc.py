"""The two services as tables, and servers and channels for them: limits, keepalive, health, statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fl_privacy.errors import FederationError, LaunchError, ProtocolError
from fl_privacy.identity.keyring import Keyring, Renewing, belong_together, certificate_of
from fl_privacy.wire import federation_pb2 as pb, stream
from fl_privacy.wire.channel import Channel

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]
Raiser = Callable[[ProtocolError], Any]
Handler = Callable[[Any, Any], Any]

_CHUNK: Codec = (stream.encode, stream.decode)


def _message(kind: Any) -> Codec:
    return kind.SerializeToString, kind.FromString


# method -> (gRPC's name for what streams, request, reply)
MIDDLEWARE: dict[str, tuple[str, Codec, Codec]] = {
    "Open": ("stream_unary", _CHUNK, _message(pb.Empty)),
    "Submit": ("stream_unary", _CHUNK, _message(pb.SubmitReply)),
    "Collect": ("unary_stream", _message(pb.CollectRequest), _CHUNK),
    "Fetch": ("unary_stream", _message(pb.FetchRequest), _CHUNK),
    "Settle": ("unary_unary", _message(pb.SettleRequest), _message(pb.Empty)),
    "Seed": ("stream_unary", _CHUNK, _message(pb.Empty)),
    "Finish": ("unary_unary", _message(pb.FinishRequest), _message(pb.Empty)),
    "Post": ("unary_unary", _message(pb.Letter), _message(pb.Empty)),
    "Pickup": ("unary_unary", _message(pb.PickupRequest), _message(pb.Letters)),
}
EVALUATOR = {"Evaluate": ("unary_unary", _message(pb.EvaluateRequest), _message(pb.EvaluateReply))}
SERVICES = {"fl_privacy.wire.Middleware": MIDDLEWARE, "fl_privacy.wire.Evaluator": EVALUATOR}

_LIMITS = [(f"grpc.max_{way}_message_length", stream.MAX_MESSAGE) for way in ("receive", "send")]
# A dead peer is noticed within half a minute, also behind a NAT that forgets idle connections.
CHANNEL_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Otherwise an idle client's keepalive counts as abuse, and its connection is closed after the third ping.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.so_reuseport", 0),
    # A fixed window of 1 MiB per stream: one that gRPC may grow by itself takes 12 MB for every uploading site.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
]


async def _refuse(context: Any, error: FederationError, refused: Raiser | None) -> None:
    # The frames of a refused stream hold its round's memory; free them now, not when the garbage collector runs.
    error.__traceback__ = error.__context__ = None
    if isinstance(error, ProtocolError):
        if refused is not None:
            refused(error)
        await context.abort(getattr(grpc.StatusCode, error.code), str(error))
    await context.abort(grpc.StatusCode.INTERNAL, str(error))


def _unary(call: Callable[[Any, Any], Awaitable[Any]], keys: Keyring, refused: Raiser | None) -> Handler:
    async def handler(request: Any, context: Any) -> Any:
        try:
            keys.refuse_revoked(certificate_of(context))
            return await call(request, context)
        except FederationError as error:
            await _refuse(context, error, refused)

    return handler


def _streaming(call: Callable[[Any, Any], AsyncIterator[Any]], keys: Keyring, refused: Raiser | None) -> Handler:
    async def handler(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            keys.refuse_revoked(certificate_of(context))
            async for part in call(request, context):
                yield part
        except FederationError as error:
            await _refuse(context, error, refused)

    return handler


def handlers(name: str, servicer: Any, keys: Keyring, refused: Raiser | None = None) -> grpc.GenericRpcHandler:
    """The gRPC handlers of a service, from a servicer's methods of the same names in lower case.

    Every call is checked against the revocations in `keys`, even on a connection that is older than they are.
    """
    made = {}
    for method, (streams, request, reply) in SERVICES[name].items():
        wrap = _streaming if streams == "unary_stream" else _unary
        wrapped = wrap(getattr(servicer, method.lower()), keys, refused)
        made[method] = getattr(grpc, f"{streams}_rpc_method_handler")(wrapped, request[1], reply[0])
    return grpc.method_handlers_generic_handler(name, made)


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


def channel(address: str, keys: Keyring) -> Channel:
    """A mutual-TLS channel to `host:port`, with whatever certificate is in `keys` at the time of a call."""
    return Channel(address, keys, CHANNEL_OPTIONS)


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


async def serve(name: str, servicer: Any, address: str, keys: Keyring, refused: Raiser | None = None) -> Any:
    """Start a mutual-TLS server of one service with gRPC health; returns (server, port)."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handlers(name, servicer, keys, refused),))
    checks = health.aio.HealthServicer()
    checks.Check, checks.Watch = (_unary(call, keys, refused) for call in (checks.Check, checks.Watch))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for service in ("", name):
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    try:
        port = server.add_secure_port(address, server_credentials(keys))
    except RuntimeError:
        port = 0
    if port == 0:
        raise LaunchError(f"listen {address}: the address is in use or not on this machine; choose another port")
    await server.start()
    return server, port
