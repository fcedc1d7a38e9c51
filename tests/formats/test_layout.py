"""The swizzled layout of block scales against its offset formula. BITWISE."""

from __future__ import annotations

import pytest
import torch
from cases import seeded
from tolerances import assert_same_bytes

from minite.formats import FormatError, layout

SHAPES = [(r, c) for r in (1, 16, 127, 128, 129, 300) for c in (1, 3, 4, 5)]


def offset(r, c, columns):
    return ((r // 128) * -(-columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_swizzle_equals_the_formula_and_unswizzle_undoes_it(rows, columns):
    scales = torch.randint(1, 256, (rows, columns), generator=seeded(rows), dtype=torch.uint8)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    expected = torch.zeros(-(-rows // 128) * 128 * -(-columns // 4) * 4, dtype=torch.uint8)
    expected[offset(r, c, columns).flatten()] = scales.flatten()
    assert_same_bytes(layout.swizzle(scales), expected, "swizzled, padding zero")
    assert_same_bytes(layout.unswizzle(expected, rows, columns), scales, "back")


def test_experts_are_padded_one_by_one_and_the_dtype_stays():
    scales = torch.rand(3, 130, 5, generator=seeded(0)).to(torch.float8_e4m3fn)
    swizzled = layout.swizzle(scales)
    assert swizzled.dtype == torch.float8_e4m3fn and swizzled.shape == (3, 256 * 8)
    for e in range(3):
        assert_same_bytes(swizzled[e], layout.swizzle(scales[e]), f"expert {e}")
    assert_same_bytes(layout.unswizzle(swizzled, 130, 5), scales)


def test_wrong_sizes_and_dtypes_are_refused():
    with pytest.raises(FormatError, match="512 bytes for 3 x 3"):
        layout.unswizzle(torch.zeros(100, dtype=torch.uint8), 3, 3)
    with pytest.raises(FormatError, match="one-byte"):
        layout.swizzle(torch.zeros(4, 4))
