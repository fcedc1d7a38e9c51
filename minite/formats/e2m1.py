"""Packed E2M1 codes: two a byte, low nibble = even column, as every library and kernel has them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from minite.formats.rounding import E2M1_VALUES


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 [.., K] -> bytes [.., K/2], low nibble = even column."""
    pairs = codes.contiguous().view(torch.int16)  # little endian: low byte = even column
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [.., K/2] -> codes uint8 [.., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def code_values(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """E2M1 values [.., K], bfloat16 or float32, of packed codes. One table look-up per byte fetches both values."""
    table = _byte_table(packed.device, dtype)
    pairs = table.index_select(0, packed.flatten().to(torch.int32))
    return pairs.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


@lru_cache(maxsize=8)
def _byte_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Both values of each of the 256 bytes, seen as one integer (int32 for bfloat16, int64 for float32)."""
    positive = torch.tensor(E2M1_VALUES, dtype=dtype, device=device)
    by_code = torch.cat((positive, -positive))
    both = by_code[unpack(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)).long()]
    return both.contiguous().view(torch.int32 if dtype == torch.bfloat16 else torch.int64).flatten()
