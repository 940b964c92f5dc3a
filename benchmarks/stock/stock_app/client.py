"""A site as in Flower's quickstart: each message loads torch, data and model, trains and returns the model."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_privacy.config import Federation
from fl_privacy.tasks.train import fit
from fl_privacy.tasks.workload import Workload, training_seed  # imports torch, as a stock app does at its top

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    federation = Federation.parse(str(context.run_config["federation"]))
    site = federation.sites[int(context.node_config["partition-id"])]
    work = Workload(federation)
    data = work.site_data(site.name)
    work.model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    round = int(str(message.content.config_records["config"]["server-round"]))
    loss = fit(work.model, data, work.recipe, training_seed(federation.seed, site.name, round), site.device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(work.model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
