"""Arithmetic modulo 2^32 for compiled loops. numba widens integers to 64 bits, which halves what a vector holds."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _operation(name: str) -> Any:
    """An LLVM instruction on two words, as a function that compiled code can call."""

    @intrinsic
    def operation(context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return types.uint32(types.uint32, types.uint32), generate

    return operation


add, multiply, both, either = map(_operation, ("add", "mul", "and_", "or_"))
left, right = map(_operation, ("shl", "lshr"))
