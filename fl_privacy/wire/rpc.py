"""The two services as tables, and servers and channels for them: limits, keepalive, health, statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fl_privacy.errors import FederationError, LaunchError, ProtocolError
from fl_privacy.identity.keyring import Keyring, Renewing, belong_together, certificate_of
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire import stream
from fl_privacy.wire.channel import Channel

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]
Raiser = Callable[[ProtocolError], Any]

_CHUNK: Codec = (stream.encode, stream.decode)


def _message(kind: Any) -> Codec:
    return kind.SerializeToString, kind.FromString


# method -> (requests stream?, replies stream?, request, reply)
MIDDLEWARE: dict[str, tuple[bool, bool, Codec, Codec]] = {
    "Open": (True, False, _CHUNK, _message(pb.Empty)),
    "Submit": (True, False, _CHUNK, _message(pb.SubmitReply)),
    "Collect": (False, True, _message(pb.CollectRequest), _CHUNK),
    "Fetch": (False, True, _message(pb.FetchRequest), _CHUNK),
    "Settle": (False, False, _message(pb.SettleRequest), _message(pb.Empty)),
    "Seed": (True, False, _CHUNK, _message(pb.Empty)),
    "Finish": (False, False, _message(pb.FinishRequest), _message(pb.Empty)),
    "Post": (False, False, _message(pb.Letter), _message(pb.Empty)),
    "Pickup": (False, False, _message(pb.PickupRequest), _message(pb.Letters)),
}
EVALUATOR: dict[str, tuple[bool, bool, Codec, Codec]] = {
    "Evaluate": (False, False, _message(pb.EvaluateRequest), _message(pb.EvaluateReply)),
}
SERVICES = {"fl_privacy.wire.Middleware": MIDDLEWARE, "fl_privacy.wire.Evaluator": EVALUATOR}

_LIMITS = [
    ("grpc.max_receive_message_length", stream.MAX_MESSAGE),
    ("grpc.max_send_message_length", stream.MAX_MESSAGE),
]
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
    # Or an idle client's keepalive counts as abuse, and it is hung up on after its third ping.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.so_reuseport", 0),
    # A fixed window of 1 MiB a stream: one that gRPC may grow by itself held 12 MB for every site that uploads.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
]


async def _refuse(context: Any, error: Exception, refused: Raiser | None) -> None:
    # The frames of a refused stream hold its round's memory; they must not wait for the garbage collector.
    error.__traceback__ = error.__context__ = None
    if isinstance(error, ProtocolError):
        if refused is not None:
            refused(error)
        await context.abort(getattr(grpc.StatusCode, error.code), str(error))
    await context.abort(
        grpc.StatusCode.INTERNAL, str(error) if isinstance(error, FederationError) else "internal error"
    )


def _unary(
    call: Callable[[Any, Any], Awaitable[Any]], keys: Keyring, refused: Raiser | None
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handler(request: Any, context: Any) -> Any:
        try:
            keys.refuse_revoked(certificate_of(context))
            return await call(request, context)
        except FederationError as error:
            await _refuse(context, error, refused)

    return handler


def _streaming(
    call: Callable[[Any, Any], AsyncIterator[Any]], keys: Keyring, refused: Raiser | None
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def handler(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            keys.refuse_revoked(certificate_of(context))
            async for part in call(request, context):
                yield part
        except FederationError as error:
            await _refuse(context, error, refused)

    return handler


_HANDLERS = {
    (True, False): grpc.stream_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (False, False): grpc.unary_unary_rpc_method_handler,
}


def handlers(name: str, servicer: Any, keys: Keyring, refused: Raiser | None = None) -> grpc.GenericRpcHandler:
    """The gRPC handlers of a service, from a servicer's methods of the same names in lower case.

    Every call is checked against the revocations in `keys`, also on a connection that is older than they are.
    """
    made = {}
    for method, (many_in, many_out, request, reply) in SERVICES[name].items():
        call = getattr(servicer, method.lower())
        wrapped = _streaming(call, keys, refused) if many_out else _unary(call, keys, refused)
        made[method] = _HANDLERS[many_in, many_out](wrapped, request[1], reply[0])
    return grpc.method_handlers_generic_handler(name, made)


class Stub:
    """A client of one service: `stub.fetch(request, timeout=...)`."""

    def __init__(self, channel: Channel, name: str) -> None:
        kinds = {(True, False): channel.stream_unary, (False, True): channel.unary_stream}
        for method, (many_in, many_out, request, reply) in SERVICES[name].items():
            make = kinds.get((many_in, many_out), channel.unary_unary)
            setattr(self, method.lower(), make(f"/{name}/{method}", request[0], reply[1]))

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
    """Mutual TLS: a caller without a certificate of our authority does not get past the handshake.

    The files are looked at for every new connection, so a renewed certificate needs no restart.
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
        raise LaunchError(f"listen {address}: the address is taken or not ours; choose another port")
    await server.start()
    return server, port
