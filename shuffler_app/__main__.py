"""`python -m shuffler_app`: one shuffler process."""

from __future__ import annotations

import asyncio
import sys

from fl_privacy.config import Federation
from fl_privacy.errors import FederationError
from fl_privacy.log import Log
from fl_privacy.wire import process

from .service import Shuffler


def main() -> int:
    options = process.arguments("The shuffler of a federation").parse_args()
    log = Log("shuffler")
    try:
        federation = Federation.load(options.config)
        shuffler = Shuffler(federation, log, process.recorder(options, federation, "shuffler"))
        asyncio.run(process.serve("fl_privacy.wire.Middleware", shuffler, options, log))
    except FederationError as error:
        log("error", reason=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
