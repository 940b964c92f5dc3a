"""`python -m aggregator_app`: one shard aggregator process."""

from __future__ import annotations

import sys
from pathlib import Path

from fl_privacy.config import Federation
from fl_privacy.deploy import process
from fl_privacy.ops.log import Log

from .service import Aggregator


def main() -> int:
    parser = process.arguments("A shard aggregator of a federation")
    parser.add_argument("--index", type=int, required=True, help="which shard: 0 to aggregators - 1")
    parser.add_argument("--state", type=Path, required=True, help="folder for this aggregator's shards")
    options = parser.parse_args()
    name = f"aggregator-{options.index}"
    log = Log(name)

    def make(federation: Federation) -> Aggregator:
        return Aggregator(federation, options.state, log, process.recorder(options, federation, name))

    return process.run("fl_privacy.wire.Middleware", make, options, log)


if __name__ == "__main__":
    sys.exit(main())
