"""How a matrix is cut into programs, and the device functions that every quantizing kernel reads and writes with."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from minite.backends.triton.rounding import block_amaxes, block_scales, e2m1_bytes, e2m1_value, max_nan

BLOCK = 16
_WARP, _MAX_CHUNKS = 32, 8


@dataclass(frozen=True)
class Tiles:
    """A program holds ``rows`` rows in registers, each as ``chunks`` pieces of ``blocks`` 1x16 blocks.

    Triton's tensors are powers of two: K = 768 is three chunks of 16 blocks.
    """

    rows: int
    blocks: int
    chunks: int
    even: bool  # no block beyond K: no column mask
    num_warps: int

    @classmethod
    def whole_rows(cls, k: int, rows: int = 1, blocks_per_thread: int = 2) -> Tiles:
        """Programs that hold whole rows of k columns, at least ``rows`` (a power of two) of them.

        Small programs win: one or two warps wait for nobody when a row's amax is reduced, and many fit a
        multiprocessor.
        """
        total = k // BLOCK
        blocks = total & -total
        if total // blocks > _MAX_CHUNKS:
            blocks = triton.next_power_of_2(total)
        chunks = -(-total // blocks)
        rows = max(rows, _WARP // blocks)
        warps = rows * blocks * chunks // (_WARP * blocks_per_thread)
        return cls(rows, blocks, chunks, total % blocks == 0, min(16, 1 << max(1, warps).bit_length() - 1))

    @property
    def constants(self) -> dict[str, int | bool]:
        """Keyword arguments of a launch. No multiply-add may be fused: see rounding.py."""
        cut = {"ROWS": self.rows, "BLOCKS": self.blocks, "CHUNKS": self.chunks, "EVEN": self.even}
        return {**cut, "num_warps": self.num_warps, "enable_fp_fusion": False}


@triton.jit
def block_index(row, rows, c, K, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """Which blocks [len(row), BLOCKS] chunk c of these rows holds, counted over the matrix; and whether they exist."""
    column = c * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    inside = (row[:, None] < rows) & (column >= 0)
    if not EVEN:
        inside = inside & (column < K // 16)
    return row[:, None].to(tl.int64) * (K // 16) + column, inside


@triton.jit
def load_blocks(x, block, inside):
    """The two halves, float32 [rows, blocks, 8]; zero where there is nothing."""
    at = x + block[:, :, None] * 16 + tl.arange(0, 8)[None, None, :]
    mask = tl.broadcast_to(inside[:, :, None], at.shape)
    return tl.load(at, mask, other=0).to(tl.float32), tl.load(at + 8, mask, other=0).to(tl.float32)


@triton.jit
def _joined(low, high):
    """[rows, blocks, n] twice -> [rows, blocks, 2 n], low before high."""
    both = tl.permute(tl.join(low, high), (0, 1, 3, 2))
    return tl.reshape(both, (low.shape[0], low.shape[1], 2 * low.shape[2]))


@triton.jit
def store_blocks(x, low, high, block, inside):
    """The inverse of load_blocks, rounded to the dtype of x."""
    halves = _joined(low, high).to(x.dtype.element_ty)
    at = x + block[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(at, halves, tl.broadcast_to(inside[:, :, None], at.shape))


@triton.jit
def chunk_amax(low, high):
    """max |x| by row: float32 [rows]; NaN where a row holds one."""
    return tl.reduce(block_amaxes(low, high), 1, max_nan)


@triton.jit
def store_quantized(low, high, s_enc, codes, scales, values, block, inside, BLOCK_ROWS: tl.constexpr):
    """Quantizes the blocks (low, high) and stores what has a pointer: codes and scales, or codes x scales."""
    amax = block_amaxes(low, high)
    if BLOCK_ROWS > 1:
        shape: tl.constexpr = (amax.shape[0] // BLOCK_ROWS, BLOCK_ROWS, amax.shape[1])
        tall = tl.reduce(tl.reshape(amax, shape), 1, max_nan)
        amax = tl.reshape(tl.broadcast_to(tall[:, None, :], shape), amax.shape)
    scale, encode = block_scales(amax, s_enc)
    y_low, y_high = low * encode[:, :, None], high * encode[:, :, None]
    if codes is not None:
        at = codes + block[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        packed = _joined(e2m1_bytes(y_low), e2m1_bytes(y_high))
        tl.store(at, packed, tl.broadcast_to(inside[:, :, None], at.shape))
        tl.store(scales + block, scale.to(tl.float8e4nv), inside)
    if values is not None:
        factor = scale[:, :, None]
        store_blocks(values, e2m1_value(y_low) * factor, e2m1_value(y_high) * factor, block, inside)
