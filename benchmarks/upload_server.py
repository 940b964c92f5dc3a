"""The receiving end of the upload benchmark: updates arrive as a stream or as one message, each in its own process.

The same `Receiver` checks both and fills a new array; only the transport differs. The stream uses the product's options
and memory settings, the message uses gRPC's defaults with a larger size limit.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fl_privacy.identity.keyring import Keyring
from fl_privacy.ops.log import Log
from fl_privacy.wire import federation_pb2 as pb, rpc, stream
from fl_privacy.wire.buffers import keep_buffers

Options = list[tuple[str, Any]]

SERVICE = "benchmarks.Upload"
ORDINARY: Options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SECONDS = struct.Struct("<d")


async def take_stream(parts: AsyncIterator[stream.Part], context: Any) -> pb.SubmitReply:
    """What a middleware does with a submission, without its rounds."""
    header = stream.header_of(await anext(parts), "vector")
    receiver = stream.Receiver(np.empty(header.length, np.float32), header.digest)
    async for part in parts:
        receiver.feed(part)
    receiver.finish()
    return pb.SubmitReply()


async def take_message(message: pb.Chunk, context: Any) -> pb.SubmitReply:
    """The same update as one ordinary message; its digest comes as metadata."""
    wanted = dict(context.invocation_metadata())["digest-bin"]
    data = message.data
    receiver = stream.Receiver(np.empty(len(data) // 4, np.float32), wanted)
    receiver.feed(memoryview(data))
    receiver.finish()
    return pb.SubmitReply()


async def cpu(request: bytes, context: Any) -> bytes:
    """CPU seconds of this process so far, user and system."""
    return SECONDS.pack(time.process_time())


def handlers() -> grpc.GenericRpcHandler:
    reply = pb.SubmitReply.SerializeToString
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Stream": grpc.stream_unary_rpc_method_handler(take_stream, stream.decode, reply),
            "Message": grpc.unary_unary_rpc_method_handler(take_message, pb.Chunk.FromString, reply),
            "Cpu": grpc.unary_unary_rpc_method_handler(cpu),
        },
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--way", choices=("stream", "message"), required=True)
    given = parser.parse_args()
    ours = given.way == "stream"
    if ours:
        keep_buffers()
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS if ours else ORDINARY)
    server.add_generic_rpc_handlers((handlers(),))
    port = server.add_secure_port("127.0.0.1:0", rpc.server_credentials(Keyring(given.keys)))
    await server.start()
    Log(given.way)("listening", port=port)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
