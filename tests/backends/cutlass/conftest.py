"""What the tests of the native kernels share."""

from __future__ import annotations

import pytest
import torch

from minite.backends.cutlass import library
from minite.errors import UserError


@pytest.fixture(scope="module")
def architecture() -> int:
    """Of the GPU that the tests run on; skips, with the reason, where no library of it is built."""
    try:
        return library.for_device(torch.device("cuda", torch.cuda.current_device())).architecture
    except UserError as error:
        pytest.skip(str(error))
