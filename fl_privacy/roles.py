"""Every kind of process in a federation, in one table: how it starts, whom it serves, what it keeps, sees and may ask.

Engines, kits, compose files, preflight, certificates, metrics and the transcript read this table: a new kind of
process is one entry. Nobody else tests a role's name.
"""

from __future__ import annotations

from dataclasses import dataclass

RUN = "{run}"  # in a path, stands for the name of a run
PEER = "peer-"  # begins the observer of what a site of a simulation received from others
SITES, CORE = "sites", "core"  # the two networks of a federation in containers


@dataclass(frozen=True)
class Role:
    """One kind of process. `options` and `flower` are names that fl_privacy/deploy/commands.py turns into commands."""

    name: str
    module: str = ""  # the Python module of its own process; empty: it runs Flower's processes only
    options: tuple[str, ...] = ()  # what that module takes besides --config, --keys, --metrics and --events
    flower: str = ""  # the Flower process that belongs to it: superlink, superexec or supernode
    numbered: bool = False  # there are several: NAME-0, NAME-1, ...
    serves: str = ""  # what it is to those that dial it: superlink, middleware or evaluator; empty: nobody dials it
    dials: tuple[str, ...] = ()  # whom it dials, by what they serve as
    awaits: bool = False  # in containers it starts once those that it dials are up
    networks: tuple[str, ...] = (SITES, CORE)
    apis: tuple[str, ...] = ()  # what the gate lets it ask of the SuperLink
    data: bool = False  # it reads a data set
    secret: bool = False  # it knows the secret that admits a SuperExec to the SuperLink
    backup: tuple[str, ...] = ()  # what in its kit is worth a backup, besides keys
    records: str = ""  # what it records under `audit: true`: views or truth
    outcomes: tuple[str, ...] = ()  # how a round can end for it, as its metrics count
    gauges: tuple[str, ...] = ()  # further metrics that it has: rounds, connections, budget

    @property
    def listens(self) -> bool:
        """Only these have host names in their certificates: a site's certificate must not pass for the shuffler's."""
        return bool(self.serves)

    @property
    def has_gate(self) -> bool:
        """It runs the SuperLink behind its gate, and admits SuperNodes."""
        return self.flower == "superlink"

    @property
    def starts_runs(self) -> bool:
        """It is started for one run at a time and writes its transcript, which always includes its own view."""
        return self.flower == "superexec"

    @property
    def has_node(self) -> bool:
        """It runs a SuperNode with a key of its own, and with it code that comes with a run."""
        return self.flower == "supernode"


_RELEASES = ("released", "failed")

# fmt: off
_TABLE = (
    Role("superlink", flower="superlink", serves="superlink",
         secret=True, backup=("nodes", "secret"), gauges=("connections",)),
    Role("server", flower="superexec", dials=("superlink", "middleware", "evaluator"), awaits=True, networks=(CORE,),
         apis=("fleet", "control", "runtime", "health"), data=True, secret=True, backup=("runs",), records="views",
         outcomes=_RELEASES, gauges=("rounds",)),
    Role("shuffler", "shuffler_app", ("state", "listen", "view"), serves="middleware",
         backup=("state",), records="views", outcomes=_RELEASES, gauges=("rounds",)),
    Role("aggregator", "aggregator_app", ("index", "state", "listen", "view"), numbered=True, serves="middleware",
         backup=("state",), records="views", outcomes=_RELEASES, gauges=("rounds",)),
    Role("mailbox", "aggregator_app.mailbox", ("state", "listen"), serves="middleware",
         backup=("state",), outcomes=_RELEASES, gauges=("rounds",)),
    Role("mix", "shuffler_app.mix", ("index", "state", "listen", "view"), numbered=True, serves="middleware",
         backup=("state",), records="views", outcomes=_RELEASES, gauges=("rounds",)),
    Role("region", "aggregator_app.region", ("index", "state", "listen", "view"), numbered=True, serves="middleware",
         backup=("state",), records="views", outcomes=_RELEASES, gauges=("rounds",)),
    Role("evaluator", "aggregator_app.evaluator", ("middleware", "data", "listen", "view"), serves="evaluator",
         dials=("middleware",), networks=(CORE,), data=True, records="views", outcomes=("evaluated", "failed")),
    Role("site", "client_app.worker", ("site", "socket", "state", "middleware", "data", "truth", "trial"),
         flower="supernode", dials=("superlink", "middleware"), awaits=True, networks=(SITES,), apis=("fleet",),
         data=True, backup=("state/ledger.jsonl", "state/models"), records="truth",
         outcomes=("uploaded", "not-sent", "failed"), gauges=("budget",)),
)
# fmt: on
ROLES = {role.name: role for role in _TABLE}
