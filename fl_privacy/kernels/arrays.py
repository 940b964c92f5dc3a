"""Short names for the types of the arrays that kernels work on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Owners = NDArray[np.uint8] | NDArray[np.uint16]
