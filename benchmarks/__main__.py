"""`python -m benchmarks`: run every benchmark and compare it with its limit; exit code 1 if one misses it."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable

from benchmarks import (
    compress,
    evaluation,
    inversion,
    kernels,
    machine,
    memory,
    noise,
    permutation,
    residues,
    result,
    rounds,
    secagg,
    shares,
    side_by_side,
    source,
    traffic,
    upload,
)
from benchmarks.result import Result

BENCHMARKS: dict[str, Callable[[bool], list[Result]]] = {
    "kernels": kernels.run,
    "noise": noise.run,
    "compress": compress.run,
    "permutation": permutation.run,
    "residues": residues.run,
    "shares": shares.run,
    "upload": upload.run,
    "side-by-side": side_by_side.run,
    "traffic": traffic.run,
    "memory": memory.run,
    "rounds": rounds.small,
    "rounds-large": rounds.large,
    "evaluation": evaluation.run,
    "inversion": inversion.run,
    "source": source.run,
    "secagg": secagg.run,
}


def main() -> int:
    options = _arguments().parse_args()
    # Treat SIGTERM as Ctrl-C: the processes of a benchmark end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts, found = machine.facts(), []
    for name in options.only or BENCHMARKS:
        began = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        results = BENCHMARKS[name](options.quick)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        found += results
        if not options.quick:
            result.save(name, results, facts)
            result.write_readme(list(BENCHMARKS))
    print(*(result.line(each, judged=not options.quick) for each in found), sep="\n")
    return 0 if options.quick or all(each.ok for each in found) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure and compare with the limits")
    parser.add_argument("--quick", action="store_true", help="small sizes; results are neither judged nor saved")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
