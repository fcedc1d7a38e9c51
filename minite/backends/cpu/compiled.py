"""How the kernels of this package are compiled, and where their machine code is kept.

numba compiles a kernel when it is first called with a new combination of types, for the very CPU, and keeps the result
for later processes. Neither fastmath nor contraction is on: every operation rounds as written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba

from minite.config.env import cache_dir
from minite.errors import UserError

inlined = numba.njit(error_model="numpy")  # a part of kernels; error_model: 1 / 0 is inf, not an exception


def kernel(function: Callable[..., Any]) -> Any:
    """An entry point: compiled at its first call, or read from the cache."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder())  # numba looks at it when it decorates, and has no argument for it
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


@lru_cache(maxsize=1)
def folder() -> Path:
    """Of this version of the package: numba notices a changed kernel, but not a changed function that it calls.

    Raises UserError where it cannot be made.
    """
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    path = cache_dir() / "numba" / digest.hexdigest()[:16]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"backend cpu: {path} for compiled code: {error.strerror}; expected a directory that can be written: set "
            "MINITE_CACHE_DIR, or precision.backend=reference"
        ) from error
    return path
