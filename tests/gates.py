"""For tests of gate and relay: a SuperLink that only echoes, a gate in front of it, and callers that send anything."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fl_privacy.addresses import show
from fl_privacy.deploy import flower
from fl_privacy.deploy.processes import Fleet
from fl_privacy.gate import listener
from fl_privacy.identity.keyring import Keyring
from fl_privacy.identity.tls import LocalKeys, server_context
from fl_privacy.ops.log import Log
from fl_privacy.ops.tail import Tail
from helpers import START, Keys

FLEET = "/v1/fleet/pull-messages"


class Echo:
    """Answers with what it received; `seen` holds every request's method, path and headers."""

    def __init__(self, local: LocalKeys, port: int = 0) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.go = threading.Event()
        echo = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def do_POST(self) -> None:
                echo.seen.append((self.command, self.path, dict(self.headers.items())))
                if self.path.endswith("/stream"):
                    return self.stream()
                digest, size = hashlib.sha256(), 0
                for data in self.parts():
                    digest.update(data)
                    size += len(data)
                self.reply(json.dumps({"size": size, "digest": digest.hexdigest()}).encode())
                return None

            do_GET = do_HEAD = do_POST

            def parts(self) -> Any:
                if self.headers.get("transfer-encoding") == "chunked":
                    while size := int(self.rfile.readline(), 16):
                        yield self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return
                left = int(self.headers.get("content-length", 0))
                while left and (data := self.rfile.read(min(left, 1 << 16))):
                    left -= len(data)
                    yield data

            def reply(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def stream(self) -> None:
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nfirst\r\n")
                self.wfile.flush()
                echo.go.wait(10)
                self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                pass

        self.server = Server(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        context = server_context(local.certificate, local.key)
        # Do the handshake in the connection's own thread.
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Proxy:
    """An HTTP proxy that supports only CONNECT; `asked` lists the targets requested."""

    def __init__(self, reply: bytes = b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n") -> None:
        self.asked: list[str] = []
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            head = b""
            while b"\r\n\r\n" not in head:
                more = sock.recv(4096)
                if not more:
                    return
                head += more
            self.asked.append(head.split()[1].decode())
            if b" 200 " not in self._reply:
                sock.sendall(self._reply)
                return
            host, _, port = self.asked[-1].rpartition(":")
            try:
                other = socket.create_connection((host, int(port)))
            except OSError:
                sock.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
                return
            with other:
                sock.sendall(self._reply)
                threading.Thread(target=self._copy, args=(sock, other), daemon=True).start()
                self._copy(other, sock)

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class Background:
    """An event loop in a thread, for gates and relays in this process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._serving: list[Future[None]] = []

    def serve(self, handle: listener.Handle, log: Log) -> str:
        """Accept connections on a free port; returns its address."""
        listening = listener.listen("127.0.0.1", 0)
        address = show(*listening.getsockname())
        self._serving.append(asyncio.run_coroutine_threadsafe(listener.accept(listening, handle, log), self._loop))
        return address

    def close(self) -> None:
        for serving in self._serving:
            serving.cancel()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@dataclass
class Front:
    """A gate process in front of an echo or a real SuperLink."""

    keys: Keys
    fleet: Fleet
    superlink: str
    local: LocalKeys
    address: str = ""

    def dial(self, role: str, name: str = "") -> ssl.SSLSocket:
        keys = self.keys.of(role, name or role)
        return dial(self.address, keys.authority_file, keys)

    def start(self, listen: str = "127.0.0.1:0", *options: str) -> None:
        command = flower.gate(listen, self.superlink, self.local, self.keys.of("superlink", "superlink"), "test")
        self.fleet.start("gate", [*command, *options])
        self.address = str(self.fleet.wait_for("gate", "listening", START)["address"])

    def events(self, event: str, name: str = "gate") -> list[dict[str, Any]]:
        return [e for e in Tail(self.fleet.children[name].log).poll() if e["event"] == event]


def dial(address: str, authority: Path, keys: Keyring | None) -> ssl.SSLSocket:
    """A TLS connection with the certificate of `keys`, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    if keys:
        context.load_cert_chain(keys.certificate_file, keys.key_file)
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=15)
    return context.wrap_socket(sock, server_hostname=host)


def rest(sock: ssl.SSLSocket) -> bytes:
    """Everything that still arrives; a reset also counts as the end."""
    data = b""
    try:
        while more := sock.recv(1 << 16):
            data += more
    except ConnectionError:
        pass
    return data


def ask(sock: ssl.SSLSocket, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request on an open connection: status and body of the answer."""
    sock.sendall(head.replace("\n", "\r\n").encode() + body)
    return answer(sock)


def answer(sock: ssl.SSLSocket) -> tuple[int, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(1 << 16)
        if not more:
            raise ConnectionError("closed without an answer")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while length and len(body) < length[0]:
        more = sock.recv(1 << 16)
        if not more:
            break
        body += more
    return int(head.split()[1]), body


def post(path: str, size: int = 0, *headers: str) -> str:
    return "\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {size}", *headers, "", ""])


def drip(sock: ssl.SSLSocket, data: bytes, pause: float) -> None:
    """Byte by byte."""
    for k in range(len(data)):
        sock.sendall(data[k : k + 1])
        time.sleep(pause)


def wait_closed(sock: ssl.SSLSocket, seconds: float) -> bool:
    """Whether the other side closes the connection within `timeout`."""
    sock.settimeout(seconds)
    began = time.monotonic()
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return time.monotonic() - began <= seconds
