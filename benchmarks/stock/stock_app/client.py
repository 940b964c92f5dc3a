"""A site in the manner of Flower's quickstart: every message loads torch, data and model, trains, and sends the model back."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_privacy.config import Federation
from fl_privacy.tasks.train import fit
from fl_privacy.tasks.workload import Workload, training_seed

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    federation = Federation.parse(str(context.run_config["federation"]))
    site = federation.site_names[int(context.node_config["partition-id"])]
    work = Workload(federation)
    data = work.site_data(site)
    work.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    round = int(message.content["config"]["server-round"])
    loss = fit(work.model, data, work.recipe, training_seed(federation.seed, site, round), _device())
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(work.model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
