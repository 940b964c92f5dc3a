"""Which process is killed at which moment of a round, and the federations that this is tried on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HOOK = Path(__file__).parent / "fault_points"
SELF = "self"
SERVICE = "fl_privacy.round.service:Middleware"
JOURNAL = "fl_privacy.round.journal:Journal"
SHUFFLER, AGGREGATOR = "shuffler_app.service:Shuffler", "aggregator_app.service:Aggregator"
AGGREGATING = "fl_privacy.round.aggregating:Aggregating"
REGION = "aggregator_app.summing:Region"
MIX, CHECKED = "shuffler_app.adding:Mix", "shuffler_app.checked:CheckedMix"
SITE, LOOP = "client_app.site:Site", "server_app.loop:Coordinator"


class Fault(NamedTuple):
    """SIGKILL for `victim` when `point` is called (`before`) or has returned (`after`) in a process of this command."""

    phase: str
    point: str
    when: str
    victim: str = SELF
    process: str = ""


def at_phases(victim: str) -> tuple[Fault, ...]:
    """For a process without phases of its own: it is killed in those of the shuffler and the server."""
    return (
        Fault("opened", f"{JOURNAL}.open", "after", victim),
        Fault("uploading", f"{SERVICE}._receive", "before", victim),
        Fault("closed", f"{SHUFFLER}.hand_out", "before", victim),
        Fault("released", f"{SHUFFLER}.hand_out", "after", victim),
        Fault("checkpointing", f"{LOOP}._checkpoint", "before", victim),
    )


BY_SHUFFLER: dict[str, tuple[Fault, ...]] = {
    "shuffler": (
        Fault("opened", f"{JOURNAL}.open", "after"),
        Fault("uploading", f"{SERVICE}._receive", "before"),
        Fault("closed", f"{SHUFFLER}.hand_out", "before"),
        Fault("release journalled", f"{JOURNAL}.release", "after"),
        Fault("released", f"{SHUFFLER}.hand_out", "after"),
        Fault("confirmed", f"{SHUFFLER}.settle", "after"),
    ),
    "worker": (
        Fault("opened", f"{SITE}._round", "before"),
        Fault("trained", f"{SITE}._train", "after"),
        Fault("charged", "fl_privacy.dp.ledger:Ledger.charge", "after"),
        Fault("uploading", "fl_privacy.wire.client:submit", "before"),
        Fault("uploaded", "fl_privacy.wire.client:submit", "after"),
    ),
    "ServerApp": (
        Fault("asked", "server_app.asking:Asking.keep", "after"),
        Fault("opened", "fl_privacy.round.collector:Collector.open", "after"),
        Fault("released", f"{LOOP}._record", "before"),
        Fault("recorded", f"{LOOP}._record", "after"),
        Fault("checkpointing", "fl_privacy.round.checkpoints:Checkpoints.save", "before"),
        Fault("checkpointed", "fl_privacy.round.checkpoints:Checkpoints.save", "after"),
    ),
    "SuperLink": at_phases("superlink"),
    "SuperNode": at_phases("supernode-site-1"),
    "ClientApp": at_phases("supernode-site-2/clientapp"),
    "fork server": at_phases("^worker-site-0"),
    "fork server of SuperNodes": at_phases("^supernode-site-0"),
    "fork servers in a SuperNode": at_phases("supernode-site-1/forkserver"),
}
BY_SHARDS: dict[str, tuple[Fault, ...]] = {
    "aggregator": (
        Fault("opened", f"{JOURNAL}.open", "after"),
        Fault("uploading", f"{SERVICE}._receive", "before"),
        Fault("closed", f"{AGGREGATOR}.hand_out", "before"),
        Fault("settling", f"{AGGREGATOR}.settle", "before"),
        Fault("shard saved", "fl_privacy.round.shard_store:ShardStore.save", "after"),
        Fault("settled", f"{AGGREGATOR}.settle", "after"),
    ),
    "evaluator": tuple(
        Fault(phase, point, when, process="aggregator_app.evaluator")
        for phase, point, when in (
            ("asked", "fl_privacy.wire.client:fetch", "before"),
            ("evaluating", "fl_privacy.tasks.workload:Workload.evaluate", "before"),
            ("evaluated", "fl_privacy.tasks.workload:Workload.evaluate", "after"),
        )
    ),
}
# Where sites aggregate.
BY_RESIDENTS: dict[str, tuple[Fault, ...]] = {
    "mailbox": tuple(
        Fault(phase, point, when, process="aggregator_app.mailbox")
        for phase, point, when in (
            ("opened", f"{JOURNAL}.open", "after"),
            ("uploading", f"{SERVICE}._receive", "before"),
            ("deciding", f"{JOURNAL}.release", "before"),
            ("release journalled", f"{JOURNAL}.release", "after"),
            ("receiving a shard", "fl_privacy.round.shard_statements:check", "before"),
            ("digests saved", "aggregator_app.carried:Signed.keep", "after"),
        )
    ),
    "aggregating site": (
        Fault("opening shards", f"{AGGREGATING}.check", "before"),
        Fault("opened shards", f"{AGGREGATING}.check", "after"),
        Fault("journalled", f"{JOURNAL}.release", "after", process="client_app.worker"),
        Fault("shard saved", f"{AGGREGATING}._step", "after"),
        Fault("shared", "fl_privacy.wire.client:share", "after"),
    ),
}
BY_MIXES: dict[str, tuple[Fault, ...]] = {
    "mix": (
        Fault("opened", f"{JOURNAL}.open", "after"),
        Fault("uploading", f"{SERVICE}._receive", "before"),
        Fault("closed", f"{MIX}.hand_out", "before"),
        Fault("settling", f"{MIX}.settle", "before"),
        Fault("release journalled", f"{JOURNAL}.release", "after"),
        Fault("sum signed", f"{JOURNAL}.sign", "after"),
        Fault("settled", f"{MIX}.settle", "after"),
        Fault("answering", f"{CHECKED}.check", "before"),
    ),
}
BY_REGIONS: dict[str, tuple[Fault, ...]] = {
    "region": (
        Fault("opened", f"{JOURNAL}.open", "after"),
        Fault("uploading", f"{SERVICE}._receive", "before"),
        Fault("closed", f"{REGION}.hand_out", "before"),
        Fault("release journalled", f"{JOURNAL}.release", "after"),
        Fault("released", f"{REGION}.hand_out", "after"),
        Fault("confirmed", f"{REGION}.settle", "after"),
    ),
}
# What only kits have, and then what they start in another way than the local engine.
BY_KITS: dict[str, tuple[Fault, ...]] = {
    "gate": at_phases("gate"),
    "relay of a site": at_phases("relay@site-0"),
    "relay of the server": at_phases("relay@server"),
    "SuperExec": at_phases("superexec@server"),
    **{f"{process} in kits": BY_SHUFFLER[process] for process in ("shuffler", "worker", "ServerApp")},
    "SuperLink in kits": at_phases("superlink@superlink"),
    "SuperNode in kits": at_phases("supernode@site-1"),
    "ClientApp in kits": at_phases("supernode/clientapp@site-2"),
}
BY_KITS_OF_SHARDS = {f"{process} in kits": faults for process, faults in BY_SHARDS.items()}
BY_KITS_OF_RESIDENTS = {f"{process} in kits": faults for process, faults in BY_RESIDENTS.items()}
FAULTS = BY_SHUFFLER | BY_SHARDS | BY_RESIDENTS | BY_MIXES | BY_REGIONS
FAULTS |= BY_KITS | BY_KITS_OF_SHARDS | BY_KITS_OF_RESIDENTS
# Which federation each process is killed in.
WHERE = {
    **dict.fromkeys(BY_SHUFFLER, "shuffler"),
    **dict.fromkeys(BY_SHARDS, "shards"),
    **dict.fromkeys(BY_RESIDENTS, "residents"),
    **dict.fromkeys(BY_MIXES, "mixes"),
    **dict.fromkeys(BY_REGIONS, "regions"),
    **dict.fromkeys(BY_KITS, "kits"),
    **dict.fromkeys(BY_KITS_OF_SHARDS, "kits of shards"),
    **dict.fromkeys(BY_KITS_OF_RESIDENTS, "kits of residents"),
}
# One kill per process: what `make test` does.
ONCE = {
    "shuffler": [
        BY_SHUFFLER["shuffler"][3],
        BY_SHUFFLER["worker"][2],
        BY_SHUFFLER["ServerApp"][2],
        BY_SHUFFLER["SuperLink"][1],
        BY_SHUFFLER["SuperNode"][1],
        BY_SHUFFLER["ClientApp"][2],
    ],
    "shards": [BY_SHARDS["aggregator"][4], BY_SHUFFLER["worker"][4], BY_SHARDS["evaluator"][1]],
    "residents": [BY_RESIDENTS["mailbox"][3], BY_RESIDENTS["aggregating site"][3]],
    "mixes": [BY_MIXES["mix"][4], BY_MIXES["mix"][7]],
    "regions": [BY_REGIONS["region"][1]],
    "kits": [BY_KITS["gate"][1], BY_KITS["relay of a site"][1], BY_KITS["relay of the server"][1]],
}


def arm(faults: Sequence[Fault], folder: Path, monkeypatch: pytest.MonkeyPatch, kits: bool = False) -> Path:
    """Let these faults happen in turn in the processes of a run in `folder/runs`; a file `n.done` for each that did."""
    plan: dict[str, Any] = {"runs": str(folder / "runs"), "faults": [fault._asdict() for fault in faults]}
    plan["metrics"] = "server/runs/*/metrics.jsonl" if kits else "*/metrics.jsonl"
    plan["pids"] = "*/run/pids.json" if kits else ".state/*/pids.json"
    done = folder / "faults"
    done.mkdir()
    (done / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setenv("FL_PRIVACY_FAULTS", str(done))
    monkeypatch.setenv("PYTHONPATH", str(HOOK))
    return done
