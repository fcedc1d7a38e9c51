"""The swizzled layout of block scales against its offset formula. BITWISE."""

from __future__ import annotations

import pytest
import torch
from cases import DEVICES, seeded
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


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_8x4_equals_the_formula_and_goes_back(rows, columns):
    scales = torch.randint(1, 256, (rows, columns), generator=seeded(rows), dtype=torch.uint8)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    width = -(-columns // 4) * 4
    expected = torch.zeros(-(-rows // 8) * 8 * width, dtype=torch.uint8)
    expected[((r // 8) * 8 * width + (c // 4) * 32 + (r % 8) * 4 + c % 4).flatten()] = scales.flatten()
    assert_same_bytes(layout.swizzle(scales, "8x4"), expected, "swizzled, padding zero")
    assert_same_bytes(layout.unswizzle(expected, rows, columns, "8x4"), scales, "back")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", ["128x4", "8x4"])
@pytest.mark.parametrize("rows", [[5, 0, 128, 129, 1], [0, 0], [300], [127, 8, 9]], ids=str)
def test_each_expert_begins_at_its_own_tile(rows, tile, device):
    columns, rows_E = 5, torch.tensor(rows, device=device)
    scales = torch.randint(1, 256, (sum(rows), columns), generator=seeded(0), dtype=torch.uint8).to(device)
    flat = layout.swizzle_experts(scales, rows_E, tile)
    height = int(tile.split("x")[0])
    offsets = [sum(-(-n // height) * height * 8 for n in rows[:e]) for e in range(len(rows) + 1)]
    assert layout.expert_offsets(rows_E, columns, tile).tolist() == offsets and flat.shape == (offsets[-1],)
    for e, part in enumerate(scales.split(rows)):
        assert_same_bytes(flat[offsets[e] : offsets[e + 1]], layout.swizzle(part, tile), f"expert {e}")
    assert_same_bytes(layout.unswizzle_experts(flat, rows_E, columns, tile), scales, "back")
    e4m3 = scales.view(torch.float8_e4m3fn)
    assert layout.swizzle_experts(e4m3, rows_E, tile).dtype == torch.float8_e4m3fn


def test_wrong_experts_and_tiles_are_refused():
    scales, rows_E = torch.zeros(5, 4, dtype=torch.uint8), torch.tensor([2, 2])
    with pytest.raises(FormatError, match="sums to 4; expected 5"):
        layout.swizzle_experts(scales, rows_E)
    with pytest.raises(FormatError, match=r"got \[5\] bytes; expected \[1024\]"):
        layout.unswizzle_experts(scales[:, 0], rows_E, 4)
    with pytest.raises(FormatError, match="'64x4'.*8x4"):
        layout.swizzle(scales, "64x4")


def test_wrong_sizes_and_dtypes_are_refused():
    with pytest.raises(FormatError, match="512 bytes for 3 x 3"):
        layout.unswizzle(torch.zeros(100, dtype=torch.uint8), 3, 3)
    with pytest.raises(FormatError, match="one-byte"):
        layout.swizzle(torch.zeros(4, 4))
