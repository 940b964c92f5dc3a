"""The site's Flower end: a new process for every message, which has nothing but a socket to the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from . import pipe

if TYPE_CHECKING:
    from client_app.simulated import Reply

RECEIPT_SIZE = 16
# The worker ends a ticket by the federation's own deadlines; this only keeps a ClientApp from outliving a dead worker.
LONGEST_TICKET = 7 * 86_400

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """In simulation nodes have no names: tell the server which partition this one is."""
    partition = int(context.node_config.get("partition-id", -1))
    return Message(RecordDict({"site": ConfigRecord({"partition": partition})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Hand the ticket to the worker; reply with a receipt of fixed size that carries no metric and no count."""
    ticket: dict[str, object] = dict(message.content.config_records["ticket"])
    model = message.content.array_records.get("model")
    payload = memoryview(model["vector"].data) if model else b""
    fields, update = _ask(context, ticket, payload)
    receipt = str(fields.get("status")).encode()[:RECEIPT_SIZE].ljust(RECEIPT_SIZE, b"\0")
    content = RecordDict({"receipt": ConfigRecord({"receipt": receipt})})
    if update:
        array = Array(dtype="u1", shape=(len(update),), stype="raw", data=bytes(update))
        content["update"] = ArrayRecord({"vector": array})
    return Message(content, reply_to=message)


def _ask(context: Context, ticket: dict[str, object], payload: bytes | memoryview) -> Reply:
    path = context.node_config.get("worker")
    if path is not None:
        return pipe.ask(str(path), ticket, payload, LONGEST_TICKET)
    from client_app.simulated import answer

    return answer(context, ticket, payload)
