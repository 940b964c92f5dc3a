"""DSC's shift (ERIS, Section 3): the difference to a reference is compressed, which both ends move alike."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np

from fl_privacy import kernels
from fl_privacy.coding import Known
from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError
from fl_privacy.shard.compressors import Compressor, Packed, Sparse, Touched
from fl_privacy.theory.utility import shift_step
from fl_privacy.vector import Vector

OURS = 2  # references to an array that nobody else holds: the attribute, and the argument of the question
SPARE = 2  # results whose memory is used again: one may still be held while the next is made
LATE = 4  # messages after which a result is not worth correcting any more


@dataclass(frozen=True)
class Message:
    """What travels: the key that chose the coordinates, and the compressed difference."""

    key: bytes
    packed: Packed


@dataclass
class Lent:
    """A result that may still be in use, and how the reference moved since it was made."""

    vector: Vector
    moves: list[tuple[Touched, Vector]] = field(default_factory=list)

    @property
    def free(self) -> bool:
        return sys.getrefcount(self.vector) <= OURS

    def follow(self) -> None:
        """Become equal to the reference again."""
        for at, moved in self.moves:
            _put(self.vector, at, moved)
        self.moves = []


class Shift:
    """One end of a shifted compression of vectors of d numbers.

    A `reference` that is given is moved in place; without one, it starts at zero. A message touches some
    coordinates only, and so do encoding and decoding it.
    """

    def __init__(
        self, d: int, p: float = 1.0, *, reference: Vector | None = None, compressor: Compressor | None = None
    ) -> None:
        self._compressor = compressor or Sparse(d, p)
        self.gamma = shift_step(self._compressor.omega)
        self.reference = np.zeros(d, np.float32) if reference is None else reference

    @property
    def reference(self) -> Vector:
        return self._reference

    @reference.setter
    def reference(self, reference: Vector) -> None:
        self._reference = reference
        self._lent: list[Lent] = []

    def encode(self, update: Vector, key: bytes) -> Message:
        """v = C(update - s); s <- s + gamma v."""
        keys.check_key(key)
        _check(update, self._reference.size)
        at = self._compressor.touched(key)
        held = _take(self._reference, at)
        with np.errstate(over="ignore"):  # what is too large is refused
            message = Message(key, self._compressor.compress(_take(update, at) - held, key))
        self._move(at, held, self._compressor.expand(message.packed))
        return message

    def decode(self, message: Message, out: Vector | None = None) -> Vector:
        """The update as the receiver knows it, s + v, written to `out` if given; s <- s + gamma v.

        Without `out` the result is read-only, and its memory is used again once the caller holds it no longer: it
        differs from a later one only where a message touched it.
        """
        if message.packed.shape != (self._compressor.words,):
            raise FederationError(f"message: {message.packed.size} words, {self._compressor.words} are needed")
        at = self._compressor.touched(message.key)
        if out is None:
            update = self._current().vector
        else:
            update = out
            np.copyto(update, self._reference)
        held, values = _take(self._reference, at), self._compressor.expand(message.packed)
        _put(update, at, held + values)
        self._move(at, held, values)
        return update if out is not None else _read_only(update)

    def told(self, message: Message) -> Known:
        """The update where the message tells it exactly, s + v / (1 + omega); elsewhere s is of earlier rounds."""
        where, difference = self._compressor.told(message.packed, message.key)
        return Known((self.reference if where is None else self.reference[where]) + difference, where, difference)

    def _current(self) -> Lent:
        """A vector equal to the reference: an earlier result that nobody holds, corrected, or a new one."""
        for lent in self._lent:
            if lent.free:
                lent.follow()
                return lent
        self._lent = [*self._lent, Lent(self._reference.copy())][-SPARE:]
        return self._lent[-1]

    def _move(self, at: Touched, held: Vector, values: Vector) -> None:
        moved = held + np.float32(self.gamma) * values
        _put(self._reference, at, moved)
        self._lent = [lent for lent in self._lent if len(lent.moves) < LATE]
        for lent in self._lent:
            lent.moves.append((at, moved))


def _take(vector: Vector, at: Touched) -> Vector:
    if isinstance(at, slice):
        return vector[at]
    found: Vector = kernels.pick("sparse", vector.size).take(vector, at)
    return found


def _put(vector: Vector, at: Touched, values: Vector) -> None:
    if isinstance(at, slice):
        vector[at] = values
    else:
        kernels.pick("sparse", vector.size).put(vector, at, values)


def _read_only(vector: Vector) -> Vector:
    view = vector.view()
    view.flags.writeable = False
    return view


def _check(update: Vector, d: int) -> None:
    if update.shape != (d,) or update.dtype != np.float32:
        raise FederationError(f"update: {update.dtype} of shape {update.shape}, a float32 vector of {d} is needed")
