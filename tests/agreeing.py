"""A simulated network for the agreement: random delays, order, loss, repetition and restarts, and faulty sites.

FL_PRIVACY_SCHEDULES=1000 python -m pytest tests/test_agreement.py -k schedule
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

from cryptography.hazmat.primitives.asymmetric import ec

from fl_privacy.agreement.machine import DEADLINE, RESEND, Agreement, Named, Output, Send, Stopped, Timer
from fl_privacy.agreement.messages import Message, Statement, Topic, encode, loads, parse, sign
from fl_privacy.agreement.saved import restore, save
from fl_privacy.agreement.terms import Terms, public
from fl_privacy.errors import ProtocolError

DISK = bytes(range(32))  # the key of the sites' files
RESEND_AFTER, VIEW_AFTER = 6.0, 15.0
LONGEST, MOST_EVENTS = 50_000.0, 60_000
KINDS = ("equivocates", "silent", "lies", "slow", "dies")


@cache
def keys_of(count: int) -> dict[str, ec.EllipticCurvePrivateKey]:
    return {f"site-{index:02}": ec.generate_private_key(ec.SECP256R1()) for index in range(count)}


def terms_of(count: int, run: str = "run", round: int = 1, roster: str = "ab" * 32) -> Terms:
    return Terms(run, round, roster, tuple((site, public(key)) for site, key in keys_of(count).items()))


def agreement_of(terms: Terms, site: str, random: random.Random) -> Agreement:
    return Agreement(terms, site, keys_of(len(terms.sites))[site], random.randbytes(32))


class Site:
    """A correct site. It writes its state before it sends, and may be killed at some of its steps."""

    side = life = 0

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.agreement = agreement_of(network.terms, name, network.random)
        self.deaths: dict[int, str] = {}  # step -> what is lost
        self.step = 0
        self.saved = b""
        self.is_down = False

    def start(self) -> None:
        self.saved = save(self.agreement, DISK) if self.deaths else b""
        self.rise()

    def rise(self) -> None:
        self.is_down = False
        self.handle(self.agreement.start)

    def take(self, sender: str, data: bytes) -> None:
        self.handle(partial(self.agreement.receive, data))

    def expired(self, name: str) -> None:
        self.handle(partial(self.agreement.expired, name))

    def handle(self, act: Callable[[], list[Output]]) -> None:
        if self.is_down:
            return
        self.step += 1
        lost = self.deaths.get(self.step, "")
        try:
            out = act()
        except ProtocolError:
            out = []
            self.network.refused += 1
        if self.deaths and out and lost != "unsaved":
            self.saved = save(self.agreement, DISK)
        if not lost:
            self.put(out)
            return
        if lost == "half":
            self.put([o for o in out if self.network.random.random() < 0.5 and isinstance(o, Send)])
        key = keys_of(len(self.network.terms.sites))[self.name]
        self.agreement = restore(self.saved, DISK, self.network.terms, key)
        self.network.restarts += 1
        self.is_down = True
        self.network.later(self.network.random.expovariate(0.1), self.rise)

    def put(self, out: Iterable[Output]) -> None:
        for output in out:
            if isinstance(output, Send):
                for to in [output.to] if output.to else self.network.others(self.name):
                    self.send(to, output.data)
            elif isinstance(output, Timer):
                self.network.timer(self, output)
            elif isinstance(output, Stopped | Named):
                self.network.events.append((self.name, output))

    def send(self, to: str, data: bytes) -> None:
        self.network.send(self.name, to, data)


class Slow(Site):
    def send(self, to: str, data: bytes) -> None:
        self.network.send(self.name, to, data, slower=25.0)


class Silent(Site):
    """From the beginning, or from some moment on."""

    def send(self, to: str, data: bytes) -> None:
        self.life -= 1
        if self.life >= 0:
            super().send(to, data)


class Lying(Site):
    """Sends many sites something else than the protocol wants, with its own good signature or a bad one."""

    def send(self, to: str, data: bytes) -> None:
        random = self.network.random
        if random.random() < 0.5:
            try:
                data = random.choice(LIES)(self, parse(loads(data)), random)
            except (ProtocolError, ValueError):
                data = b"[]"
        super().send(to, data)

    def signed(self, said: Statement, terms: Terms | None = None) -> Statement:
        return sign(terms or self.network.terms, keys_of(len(self.network.terms.sites))[self.name], said)

    def other_content(self, message: Message, random: random.Random) -> bytes:
        content = random.randbytes(len(message.said.content))
        return encode(replace(message, said=self.signed(replace(message.said, content=content))))

    def other_view(self, message: Message, random: random.Random) -> bytes:
        view = random.choice((message.said.view + 1, 1000))
        return encode(replace(message, said=self.signed(replace(message.said, view=view))))

    def no_claim(self, message: Message, random: random.Random) -> bytes:
        """A view change that hides what was prepared."""
        said = replace(message.said, topic=Topic.CHANGE, content=b"", view=message.said.view + 1)
        return encode(Message(self.signed(said)))

    def other_value(self, message: Message, random: random.Random) -> bytes:
        """Another set of commitments or contributions, as good as the proposed one; or rubbish."""
        listed = loads(message.value)
        listed.pop(random.randrange(len(listed)))
        value = random.choice((json.dumps(listed, separators=(",", ":")).encode(), b"1"))
        said = replace(message.said, content=self.agreement.ballot.digest(value))
        return encode(replace(message, said=self.signed(said), value=value))

    def other_author(self, message: Message, random: random.Random) -> bytes:
        author = random.choice(self.network.others(self.name))
        return encode(replace(message, said=self.signed(replace(message.said, author=author))))

    def other_run(self, message: Message, random: random.Random) -> bytes:
        return encode(replace(message, said=self.signed(message.said, replace(self.network.terms, run="another"))))

    def fewer(self, message: Message, random: random.Random) -> bytes:
        return encode(replace(message, support=message.support[1:]))

    def rubbish(self, message: Message, random: random.Random) -> bytes:
        return random.randbytes(40)


LIES = (
    Lying.other_content,
    Lying.other_view,
    Lying.no_claim,
    Lying.other_value,
    Lying.other_author,
    Lying.other_run,
    Lying.fewer,
    Lying.rubbish,
)


class Twin(Site):
    """One of the two faces of a site that equivocates: a correct machine that shows itself to one side only."""

    def send(self, to: str, data: bytes) -> None:
        if self.network.side(to) in (self.side, None):
            self.network.send(self.name, to, data, side=self.side)


MADE = {"equivocates": Twin, "silent": Silent, "dies": Silent, "lies": Lying, "slow": Slow}


class Network:
    """`faulty` says how each faulty site behaves; those that equivocate do so together, towards two sides.

    `loss` of messages; `blur`: how often a face shows itself to the wrong side; `cut`: no message crosses the sides.
    """

    def __init__(
        self,
        seed: int,
        faulty: dict[str, str],
        count: int = 7,
        loss: float = 0.0,
        blur: float = 0.0,
        cut: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.terms = terms_of(count, f"run-{seed}")
        self.faulty, self.loss, self.blur, self.cut = faulty, loss, blur, cut
        self.patience = self.random.uniform(4.0, VIEW_AFTER)  # how long the first view may take
        self.now, self.refused, self.restarts, self.delivered = 0.0, 0, 0, 0
        self.events: list[tuple[str, Output]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        correct = [site for site in self.terms.sites if site not in faulty]
        self.random.shuffle(correct)
        self._sides = {site: index % 2 for index, site in enumerate(correct)}
        self.sites: dict[str, list[Site]] = {}

    def run(self, deaths: dict[str, dict[int, str]] | None = None, deadline: float = LONGEST) -> None:
        for name in self.terms.sites:
            self.sites[name] = list(self._made(name))
        for name, site in [(name, site) for name, sites in self.sites.items() for site in sites]:
            site.deaths = (deaths or {}).get(name, {})
            site.start()
        for site in self.correct:
            self.later(deadline, partial(site.expired, DEADLINE))
        while self._queue and not self.is_settled and self.delivered < MOST_EVENTS:
            self.now, _, act = heapq.heappop(self._queue)
            self.delivered += 1
            act()

    def _made(self, name: str) -> Iterator[Site]:
        how = self.faulty.get(name, "")
        for side in (0, 1) if how == "equivocates" else (0,):
            site = MADE.get(how, Site)(self, name)
            site.side, site.life = side, self.random.randrange(100) if how == "dies" else 0
            yield site

    @property
    def correct(self) -> list[Site]:
        return [found[0] for name, found in self.sites.items() if name not in self.faulty]

    @property
    def is_settled(self) -> bool:
        return all(site.agreement.is_over for site in self.correct)

    @property
    def secrets(self) -> set[bytes]:
        return {site.agreement.outcome.secret for site in self.correct if site.agreement.outcome is not None}

    def others(self, name: str) -> list[str]:
        return [site for site in self.terms.sites if site != name]

    def side(self, name: str) -> int | None:
        """Which face a site sees; None: both, as the faces of other equivocators do."""
        if name not in self._sides or self.random.random() < self.blur:
            return None
        return self._sides[name]

    def later(self, delay: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, act))

    def timer(self, site: Site, timer: Timer) -> None:
        if timer.name != DEADLINE:
            after = RESEND_AFTER if timer.name == RESEND else self.patience * 2 ** min(timer.doublings, 8)
            self.later(after * self.random.uniform(0.7, 1.3), partial(site.expired, timer.name))

    def send(self, sender: str, to: str, data: bytes, slower: float = 1.0, side: int | None = None) -> None:
        if self.cut and {self._sides.get(sender), self._sides.get(to)} == {0, 1}:
            return
        for _ in range(2 if self.random.random() < 0.03 else 1):
            if self.random.random() >= self.loss:
                self.later(self.random.expovariate(1.0) * slower, partial(self._deliver, sender, to, data, side))

    def _deliver(self, sender: str, to: str, data: bytes, side: int | None) -> None:
        """To a site with two faces: to the one on the sender's side; contributions of correct sites to both."""
        shared = data.startswith((b'["commitment"', b'["opening"')) and not self.cut
        seen = side if side is not None or shared else self._sides.get(sender)
        for index, site in enumerate(self.sites[to]):
            if len(self.sites[to]) == 1 or seen is None or index == seen:
                site.take(sender, data)


def schedule(seed: int) -> Network:
    """Seven sites, two of them faulty in some way, and up to three restarts of others; the seed decides everything."""
    random_ = random.Random(seed)
    names = terms_of(7).sites
    heads = random_.choice(([0, 1], [0, 2], [1, 2], random_.sample(range(7), 2)))
    together = random_.random() < 0.3
    faulty = {names[index]: "equivocates" if together else random_.choice(KINDS) for index in heads}
    network = Network(seed, faulty, loss=random_.choice((0.0, 0.1, 0.3)), blur=random_.choice((0.0, 0.3)))
    deaths: dict[str, dict[int, str]] = {}
    for name in random_.sample([name for name in names if name not in faulty], random_.choice((0, 1, 3))):
        deaths[name] = {random_.randrange(2, 80): random_.choice(("unsaved", "unsent", "half")) for _ in range(2)}
    network.run(deaths)
    return network


def problems(network: Network) -> list[str]:
    """What went wrong among the correct sites."""
    found = []
    if len(network.secrets) != 1:
        found.append(f"{len(network.secrets)} secrets")
    behind = [site.name for site in network.correct if site.agreement.outcome is None]
    if behind:
        found.append(f"undecided at {network.now:.0f}: {', '.join(behind)}")
    for site in network.correct:
        for name, proof in site.agreement.proofs.items():
            if name not in network.faulty or not proof.reason(network.terms):
                found.append(f"{site.name} accuses {name}")
    return found
