"""One update over mutual TLS: our chunked stream against one ordinary protobuf message, in bytes per CPU second.

CPU time of both ends, user and system: on a busy machine it drifts less than wall time, and it is what a shuffler with
many sites runs out of. The two ways take turns, and the median ratio of neighbours counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from benchmarks.parties import HOST, MEGABYTE, PARAMETERS, QUICK_PARAMETERS, parties
from benchmarks.result import Result
from benchmarks.upload_server import ORDINARY, SECONDS, SERVICE
from fl_privacy.wire import client, rpc, stream
from fl_privacy.wire import federation_pb2 as pb
from fl_privacy.wire.identity import Keyring

LIMIT = 2.5
TIMEOUT = 60.0


class Sender:
    """The sending end, with the CPU time of both processes."""

    def __init__(self, keys: Keyring, stream_port: int, message_port: int) -> None:
        credentials, reply = keys.channel_credentials(), pb.SubmitReply.FromString
        tuned = rpc.channel(f"{HOST}:{stream_port}", keys)
        ordinary = grpc.secure_channel(f"{HOST}:{message_port}", credentials, options=ORDINARY)
        self._channels = tuned, ordinary
        self._stub: Any = SimpleNamespace(submit=tuned.stream_unary(f"/{SERVICE}/Stream", stream.encode, reply))
        self._message = ordinary.unary_unary(f"/{SERVICE}/Message", pb.Chunk.SerializeToString, reply)
        self._cpu = ordinary.unary_unary(f"/{SERVICE}/Cpu")

    def stream(self, update: NDArray[np.float32]) -> None:
        client.submit(self._stub, pb.RoundHeader(), update, TIMEOUT)

    def message(self, update: NDArray[np.float32]) -> None:
        digest = ("digest-bin", stream.digest(update))
        self._message(pb.Chunk(data=update.tobytes()), timeout=TIMEOUT, metadata=(digest,))

    def seconds(self, send: Callable[[NDArray[np.float32]], None], update: NDArray[np.float32]) -> float:
        """CPU seconds of both ends for one upload."""
        before = self._both()
        send(update)
        return self._both() - before

    def _both(self) -> float:
        remote: float = SECONDS.unpack(self._cpu(b"", wait_for_ready=True, timeout=TIMEOUT))[0]
        return remote + time.process_time()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def run(quick: bool = False) -> list[Result]:
    size, repeats = (QUICK_PARAMETERS, 3) if quick else (PARAMETERS, 15)
    update = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    with parties("bench") as made:
        keys = made.keys("shuffler", "server").folder
        script = Path(__file__).with_name("upload_server.py")
        made.fleet.start("server", [sys.executable, str(script), "--keys", str(keys)])
        ports = made.fleet.wait_for("server", "listening", TIMEOUT)
        sender = Sender(made.keys("site", "site-0"), ports["stream"], ports["message"])
        try:
            streams, messages = _measure(sender, update, repeats)
        finally:
            sender.close()
    ratio = statistics.median(m / s for s, m in zip(streams, messages, strict=True))
    detail = _detail(update.nbytes, streams, messages)
    return [Result("upload, stream to one message", ratio, LIMIT, "x bytes/CPU s", "higher", detail)]


def _measure(sender: Sender, update: NDArray[np.float32], repeats: int) -> tuple[list[float], list[float]]:
    streams, messages = [], []
    for repeat in range(repeats + 1):
        pair = sender.seconds(sender.stream, update), sender.seconds(sender.message, update)
        if repeat:  # the first pair connects and warms up
            streams.append(pair[0])
            messages.append(pair[1])
    return streams, messages


def _detail(size: int, streams: list[float], messages: list[float]) -> dict[str, Any]:
    def rate(seconds: list[float]) -> float:
        return round(size / MEGABYTE / statistics.median(seconds), 1)

    return {
        "megabytes": round(size / MEGABYTE, 1),
        "repeats": len(streams),
        "stream_mb_per_cpu_second": rate(streams),
        "message_mb_per_cpu_second": rate(messages),
    }
