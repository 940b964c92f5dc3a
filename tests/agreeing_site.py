"""A process with one site's part in an agreement: KEYS STATE ADDRESS NAME [FACES]. It prints events as JSON.

With two faces it is two sites with one key, each with a state of its own: it contradicts itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from boards import FAST
from fl_privacy.identity import accepted
from fl_privacy.identity.keyring import Identity, Keyring
from fl_privacy.round.agreeing import Agreeing
from fl_privacy.wire import rpc


def log(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main(folder: str, state: str, address: str, name: str, faces: str = "1") -> None:
    sites = []
    for face in range(int(faces)):
        own = Path(state) / f"face-{face}"
        own.mkdir(parents=True, exist_ok=True)
        keys = Keyring(Path(folder), own)
        accepted.accept(Keyring(Path(folder)).roster(), own)

        def dial(keys: Keyring = keys) -> rpc.Stub:
            return rpc.middleware(rpc.channel(address, keys, Identity("test", "mailbox", "mailbox")))

        sites.append(Agreeing("test", name, keys, own, dial, 120.0, log, FAST).start())
    log("started")
    if len(sites) == 1:
        log("secret", digest=hashlib.sha256(sites[0].agreed().secret).hexdigest())
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
