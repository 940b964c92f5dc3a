"""The sending end of the upload benchmark: one upload per line on standard input, answered with its CPU seconds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from benchmarks.upload_server import ORDINARY, SECONDS, SERVICE
from fl_privacy.coding import FLOAT32
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.wire import client, federation_pb2 as pb, rpc, stream
from fl_privacy.wire.buffers import keep_buffers

TIMEOUT = 60.0

Send = Callable[[NDArray[np.float32]], object]


def streaming(channel: grpc.Channel) -> Send:
    """As a site sends it."""
    call = channel.stream_unary(f"/{SERVICE}/Stream", stream.encode, pb.SubmitReply.FromString)
    stub: Any = SimpleNamespace(submit=call)
    return lambda update: client.submit(stub, pb.RoundHeader(), update, TIMEOUT, FLOAT32)


def messaging(channel: grpc.Channel) -> Send:
    """As one ordinary message, with its digest as metadata."""
    call = channel.unary_unary(f"/{SERVICE}/Message", pb.Chunk.SerializeToString, pb.SubmitReply.FromString)

    def send(update: NDArray[np.float32]) -> object:
        digest = ("digest-bin", stream.digest(update))
        return call(pb.Chunk(data=update.tobytes()), timeout=TIMEOUT, metadata=(digest,))

    return send


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--way", choices=("stream", "message"), required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--peer", required=True, help="the identity of whoever listens there")
    parser.add_argument("--size", type=int, required=True)
    given = parser.parse_args()
    keys = Keyring(given.keys)
    if given.way == "stream":
        keep_buffers()
        channel = rpc.channel(given.address, keys, Identity.parse(given.peer))
    else:
        key, certificate, authority = keys.read()
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        channel = grpc.secure_channel(given.address, credentials, options=ORDINARY)
    send = streaming(channel) if given.way == "stream" else messaging(channel)
    remote = channel.unary_unary(f"/{SERVICE}/Cpu")
    update = np.random.default_rng(0).standard_normal(given.size, dtype=np.float32)

    def both() -> float:
        far: float = SECONDS.unpack(remote(b"", wait_for_ready=True, timeout=TIMEOUT))[0]
        return far + time.process_time()

    for _ in sys.stdin:
        before = both()
        send(update)
        print(both() - before, flush=True)


if __name__ == "__main__":
    main()
