"""The random words behind a shuffle: AES-256 in counter mode with a single-use key.

The 128-bit counter has two halves: the upper selects a stream, the lower a 16-byte block of it, so any thread can start
anywhere. Distinguishing b blocks from true randomness succeeds with probability at most b^2 / 2^129 beyond
breaking AES itself: below 2^-80 for a model of 10^7 parameters.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

WORD = 8
BLOCK = 16


class Words:
    """Stream `stream` of `key` as little-endian 64-bit words, starting at word `start` (an even number)."""

    def __init__(self, key: bytes, stream: int = 0, start: int = 0) -> None:
        counter = (stream << 64) + start * WORD // BLOCK
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(counter.to_bytes(BLOCK, "big"))).encryptor()
        self._zeros = bytes(0)
        self._buffer = np.empty(0, np.uint8)

    def take(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words, in a buffer that the next call overwrites."""
        size = count * WORD
        if size > len(self._zeros):
            self._zeros = bytes(size)
            self._buffer = np.empty(size + BLOCK, np.uint8)
        self._encryptor.update_into(memoryview(self._zeros)[:size], self._buffer.data)
        return self._buffer[:size].view(np.uint64)
