"""DSC's shift (ERIS, Section 3): the difference to a reference is compressed, which both ends move alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fl_privacy.coding import Known
from fl_privacy.crypto import keys
from fl_privacy.errors import FederationError
from fl_privacy.shard.compressors import Compressor, Packed, Sparse
from fl_privacy.theory.utility import shift_step
from fl_privacy.vector import Vector


@dataclass(frozen=True)
class Message:
    """What travels: the key that chose the coordinates, and the compressed difference."""

    key: bytes
    packed: Packed


class Shift:
    """One end of a shifted compression of vectors of d numbers; without `reference`, it starts at zero."""

    def __init__(
        self, d: int, p: float = 1.0, *, reference: Vector | None = None, compressor: Compressor | None = None
    ) -> None:
        self._compressor = compressor or Sparse(d, p)
        self.gamma = shift_step(self._compressor.omega)
        self.reference = np.zeros(d, np.float32) if reference is None else reference.copy()

    def encode(self, update: Vector, key: bytes) -> Message:
        """v = C(update - s); s <- s + gamma v."""
        keys.check_key(key)
        _check(update, self.reference.size)
        message = Message(key, self._compressor.compress(update, self.reference, key))
        self._move(message)
        return message

    def decode(self, message: Message, out: Vector | None = None) -> Vector:
        """The update as the receiver knows it, s + v, written to `out` if given; s <- s + gamma v."""
        if message.packed.shape != (self._compressor.words,):
            raise FederationError(f"message: {message.packed.size} words, {self._compressor.words} are needed")
        update = np.empty_like(self.reference) if out is None else out
        np.copyto(update, self.reference)
        self._compressor.add(message.packed, message.key, update)
        self._move(message)
        return update

    def told(self, message: Message) -> Known:
        """The update where the message tells it exactly, s + v / (1 + omega); elsewhere s is of earlier rounds."""
        where, difference = self._compressor.told(message.packed, message.key)
        return Known((self.reference if where is None else self.reference[where]) + difference, where, difference)

    def _move(self, message: Message) -> None:
        self._compressor.add(message.packed, message.key, self.reference, self.gamma)


def _check(update: Vector, d: int) -> None:
    if update.shape != (d,) or update.dtype != np.float32:
        raise FederationError(f"update: {update.dtype} of shape {update.shape}, a float32 vector of {d} is needed")
