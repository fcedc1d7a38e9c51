"""Megatron without its notices: what is not installed, what torch will rename, what is unusual about our modules."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Mute warnings that megatron raises or that its calls raise in torch.distributed. Also a decorator."""
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")
            yield
    finally:
        logger.setLevel(level)
