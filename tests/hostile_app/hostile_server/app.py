"""Sends the hostile ClientApp to every site and records what it returns."""

import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    facts_file = Path(context.run_config["home"]) / "hostile.json"
    while not facts_file.exists():
        time.sleep(0.1)
    facts = json.loads(facts_file.read_text())
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    content = RecordDict({"facts": ConfigRecord({k: json.dumps(v) for k, v in facts.items()})})
    replies = grid.send_and_receive([Message(content, node, "train") for node in nodes], timeout=100)
    loot = [dict(r.content.config_records["loot"]) if r.has_content() else {"error": str(r.error)} for r in replies]
    draft = Path(facts["out"] + ".part")
    draft.write_text(json.dumps(loot))
    draft.rename(facts["out"])
