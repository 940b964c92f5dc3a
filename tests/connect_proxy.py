"""For tests: `python connect_proxy.py HOST PORT`, an HTTP proxy that supports only CONNECT and prints every target."""

from __future__ import annotations

import asyncio
import sys

CHUNK = 2**16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        if method != "CONNECT":
            writer.write(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n")
            writer.close()
            return
        host, _, port = target.rpartition(":")
        there = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, asyncio.IncompleteReadError):
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
        writer.close()
        return
    print(target, flush=True)
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))


async def _main(host: str, port: str) -> None:
    server = await asyncio.start_server(_handle, host, int(port))
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
