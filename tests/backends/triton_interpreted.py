"""Run by test_triton_interpreter.py in a process of its own, under TRITON_INTERPRET=1: kernels on CPU tensors.

Two things the interpreter cannot do are left to the GPU tests: inline assembly, replaced here, and BF16 subnormals,
which it reads as 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import EDGE_INPUTS, normal  # noqa: E402

from minite.backends.triton import quantize, rounding, tiles  # noqa: E402
from minite.formats import block_scaled, nvfp4  # noqa: E402

_sum = rounding._e2m1_sum


@triton.jit
def portable_bytes(y):
    """rounding.e2m1_bytes without inline assembly."""
    total, _ = _sum(y)
    bits = total.to(tl.int32, bitcast=True)
    code = ((bits + (bits >> 22) - 2) & 7) | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
    even, odd = tl.split(tl.reshape(code, (y.shape[0], y.shape[1], 4, 2)))
    return (even | (odd << 4)).to(tl.uint8)


def differences(x, block, outer):
    """What differs between the kernels and the definition, as text; empty if nothing."""
    wanted = nvfp4.quantize(x, block, outer)
    found = [quantize.quantize(x, block, outer).first_difference(wanted)]
    values = block_scaled(wanted).view(torch.int16)
    found.append(None if quantize.block_scaled(wanted).view(torch.int16).equal(values) else "read back differs")
    if block == (1, 16):
        fake, amax = quantize.fake_quantize(x, outer)
        found.append(None if fake.view(torch.int16).equal(values) and amax.equal(wanted.amax) else "fake differs")
    return [f"{x.dtype} {list(x.shape)} {block} {outer}: {text}" for text in found if text]


def main():
    tiles.e2m1_bytes = portable_bytes
    failures, count = [], 0
    for name, make in EDGE_INPUTS.items():
        for block, outer, dtype in (
            ((1, 16), "row", torch.bfloat16),
            ((1, 16), "tensor", torch.float32),
            ((16, 16), "tensor", torch.bfloat16),
        ):
            if (name, dtype) != ("subnormals", torch.bfloat16):
                failures += [f"{name} {text}" for text in differences(make(16, 48, dtype), block, outer)]
                count += 1
    failures += differences(normal(3, 16, 64), (1, 16), "expert") + differences(normal(2, 768), (1, 16), "row")
    failures += differences(normal(0, 64), (1, 16), "row") + differences(normal(2, 2064), (1, 16), "row")
    print("\n".join([*failures, f"{count + 4} cases, {len(failures)} failures"]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
