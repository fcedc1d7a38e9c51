"""Run by test_triton_interpreter.py in a process of its own, under TRITON_INTERPRET=1: kernels on CPU tensors.

Two things the interpreter cannot do are left to the GPU tests: inline assembly, replaced here, and BF16 subnormals,
which it reads as 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import EDGE_INPUTS, exact_norm, normal  # noqa: E402

from minite.backends.triton import attention, fused, heads, moe, packed, quantize, rounding, tiles  # noqa: E402
from minite.backends.triton.grouped import tile_table  # noqa: E402
from minite.backends.triton.layers import FusedLayers  # noqa: E402
from minite.formats import block_scaled, nvfp4  # noqa: E402
from minite.layers import ops  # noqa: E402

_sum = rounding._e2m1_sum


@triton.jit
def portable_bytes(y):
    """rounding.e2m1_bytes without inline assembly."""
    total, _ = _sum(y)
    bits = total.to(tl.int32, bitcast=True)
    code = ((bits + (bits >> 22) - 2) & 7) | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
    even, odd = tl.split(tl.reshape(code, (y.shape[0], y.shape[1], 4, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def portable_rounded(x):
    """fused.rounded without inline assembly; the interpreter's own conversion cuts off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def portable_exp(x):
    """libdevice.exp, which the interpreter has not."""
    return tl.exp(x)


def norms_differ():
    """Norm of a sum, then of heads with rotation and places for keys and values; rows that nobody may touch."""
    failures = []
    for rows, k in ((5, 48), (3, 2048), (4, 256)):
        x, y, w = normal(rows, k), normal(rows, k, seed=1), normal(k, seed=2)
        out = fused.rms_norm(x, w, 1e-6, ("plain",), y)
        if not (out.total.equal(x + y) and out.plain.equal(exact_norm(x + y, w, 1e-6))):
            failures.append(f"norm of a sum differs, K {k}")
        if not fused.rms_norm(x, w, 1e-6, ("plain",)).plain.equal(exact_norm(x, w, 1e-6)):
            failures.append(f"norm differs, K {k}")
    keys, w = normal(9, 1, 2, 256, seed=5)[..., 128:192], normal(64, seed=4)  # as megatron splits them off
    if not FusedLayers(None).rms_norm(keys, w, 1e-6).equal(exact_norm(keys, w, 1e-6)):
        failures.append("norm of strided keys differs")
    for total, kv, dim, norms in ((8, 2, 16, True), (40, 4, 128, True), (12, 1, 64, False)):
        qkv, weights = normal(3, total, dim), (normal(dim, seed=3), normal(dim, seed=4))
        cos, sin = ops.rope_cos_sin(torch.tensor([0, 7, 4000]), dim, 1e4)
        q, k, v = qkv.split((total - 2 * kv, kv, kv), dim=1)
        if norms:
            q, k = (exact_norm(t, w, 1e-6) for t, w in zip((q, k), weights, strict=True))
        wanted = [ops.apply_rope(q, cos, sin, False), ops.apply_rope(k, cos, sin, False), v]
        given = weights if norms else None
        got = heads.heads(qkv, kv, given, 1e-6, cos, sin, None)
        pools = [torch.full((9, kv, dim), 7.0, dtype=torch.bfloat16) for _ in range(2)]
        slot = torch.tensor([4, 8, 0])
        placed = heads.heads(qkv, kv, given, 1e-6, cos, sin, (*pools, slot))
        free = [s for s in range(9) if s not in slot.tolist()]
        good = all(a.equal(b) for a, b in zip(got, wanted, strict=True)) and placed[0].equal(wanted[0])
        good &= pools[0][slot].equal(wanted[1]) and pools[1][slot].equal(wanted[2])
        if not (good and all((pool[free] == 7).all() for pool in pools)):
            failures.append(f"heads differ, {total} of {dim}")
    return failures


def routing_differs():
    """Choice with ties, zeros of both signs and NaN; order of rows against a stable sort."""
    failures = []
    for tokens, experts, top in ((1, 4, 2), (37, 128, 8), (9, 100, 6), (600, 8, 1)):
        logits = normal(tokens, experts, dtype=torch.float32).mul(4).round() / 4  # many ties
        logits[logits == 0] *= torch.where(torch.arange(int((logits == 0).sum())) % 2 == 0, 1.0, -1.0)
        logits[0, 1] = float("-inf")
        prob, expert = moe.route(logits, top)
        wanted_prob, wanted = ops.route_topk(logits, top)
        if not (expert.equal(wanted) and (prob - wanted_prob).abs().max() < 2.0**-20):
            failures.append(f"route of {experts} differs")
        routing = moe.Routing.of(expert, experts)
        flat, slot = expert.flatten().sort(stable=True)
        good = routing.token_R.equal(slot // top) and routing.rows_E.equal(torch.bincount(flat, minlength=experts))
        good &= routing.position_Tk.flatten()[slot].equal(torch.arange(tokens * top, dtype=torch.int32))
        x, amax = normal(tokens, 48), normal(tokens, dtype=torch.float32)
        rows, scales = routing.spread(x, amax)
        if not (good and rows.equal(x[routing.token_R]) and scales.equal(amax[routing.token_R])):
            failures.append(f"rows of {experts} differ")
    broken = torch.full((2, 8), float("nan"))
    return failures + ([] if moe.route(broken, 3)[1].tolist() == [[0, 1, 2]] * 2 else ["route of NaN differs"])


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


def unpacked(p, n, k):
    """float64 [n, k]: what packed.cu makes of the words and scales of a matrix, in plain arithmetic."""

    def bf16(bits):
        return ((bits & 0xFFFF) << 16).to(torch.int32).view(torch.float32).double()

    w = p.codes[0].to(torch.int64) & 0xFFFFFFFF  # [n / 16, k / 64, 32, 4]
    shifted = [w << 3 * pair & 0x81C081C0 for pair in range(3)]
    shifted.append(w << 1 & 0x80008000 | w >> 4 & 0x00C000C0 | w >> 5 & 0x01000100)
    scale = bf16(p.scales[0].to(torch.int64) * 16 + 0x7000)  # [n / 16, k / 128, 8 g, 8 blocks, 2]
    scale = scale.unflatten(3, (2, 4)).transpose(2, 3).flatten(1, 2)  # [n / 16, k / 64, 8 g, 4, 2]
    out = torch.zeros(n // 16, 2, 8, k // 64, 4, 2, 4, 2, dtype=torch.float64)  # strip, 8 rows, g, 64, b, 8, t, even
    for pair in range(4):
        for odd in range(2):
            value = bf16(shifted[pair] >> 16 * odd).unflatten(2, (8, 4)) * scale[..., None, :, pair % 2] * 256
            out[:, pair % 2, :, :, :, pair // 2, :, odd] = value.permute(0, 2, 1, 4, 3)
    return out.reshape(n, k)


def packing_differs():
    """Whether packed.pack loses a value; blocks of every size, so that scales are subnormal, and zero over codes."""
    n, k = 32, 256
    size = torch.exp2(torch.randint(-18, 3, (n, k // 16), generator=torch.Generator().manual_seed(1)).float())
    q = nvfp4.quantize((normal(n, k).float() * size.repeat_interleave(16, 1)).bfloat16())
    assert (q.block_scale.float() == 0).any() and (q.block_scale.view(torch.uint8) % 128 < 8).any()
    equal = unpacked(packed.pack(q), n, k).equal(block_scaled(q, torch.float64))
    return [] if equal else ["packed weight differs"]


def table_differs():
    """Tiles of sequences of any number and length, empty ones among them, against a loop."""
    for sequences, longest, rows in ((5, 40, 8), (130, 3, 8), (300, 2, 64)):
        length_S = torch.randint(0, longest + 1, (sequences,), generator=torch.Generator().manual_seed(2))
        length_S[sequences // 2] = 0
        wanted, start = [], 0
        for s, length in enumerate(length_S.tolist()):
            wanted += [[s, row, start + length] for row in range(start, start + length, rows)]
            start += length
        table, limit = tile_table(length_S, start, rows)
        found = table[:3, : int(table[3, 0])].T.tolist()
        if found != wanted or limit < len(wanted):
            return [f"tile table of {sequences} sequences differs"]
    return []


def attention_differs():
    """Against the layer's, and decode against prefill to the bit. float16: the interpreter has no bfloat16 products."""
    lengths = torch.tensor([5, 1, 0, 70, 130])
    cu, total = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum())
    q, k, v = (normal(total, h, 16, seed=h, dtype=torch.float16) for h in (6, 2, 2))
    out = attention.attention(q, k, v, cu, 0.25)
    wanted = ops.attention(q, k, v, cu, 0.25, strict=False)
    last = cu[1:][lengths > 0] - 1
    decoded = attention.attention_decode(q[last], k, v, cu[:-1][lengths > 0], lengths[lengths > 0], 0.25)
    failures = [] if (out.float() - wanted.float()).abs().max() < 2**-10 else ["attention differs"]
    failures += [] if decoded.equal(out[last]) else ["decode differs from prefill"]
    slots = torch.randperm(2 * total, generator=torch.Generator().manual_seed(0))[:total]
    pools = [torch.full((2 * total, *t.shape[1:]), float("nan"), dtype=t.dtype) for t in (k, v)]
    for pool, t in zip(pools, (k, v), strict=True):
        pool[slots] = t
    paged = attention.attention_decode(q[last], *pools, cu[:-1][lengths > 0], lengths[lengths > 0], 0.25, slots)
    failures += [] if paged.equal(out[last]) else ["decode from scattered slots differs"]
    # 64, not 65: here a product's bits depend on the row of the tile, unlike on a GPU
    for prefix in (torch.zeros_like(lengths), torch.tensor([2, 0, 0, 69, 64])):
        new = torch.cat([torch.arange(cu[s] + prefix[s], cu[s + 1]) for s in range(len(lengths))])
        queries = torch.nn.functional.pad((lengths - prefix).cumsum(0), (1, 0))
        paged = attention.attention_paged(q[new], *pools, queries, prefix, cu[:-1], slots, 0.25)
        failures += [] if paged.equal(out[new]) else [f"attention behind {prefix.tolist()} differs"]
    return failures


def main():
    tiles.e2m1_bytes, moe.libdevice = portable_bytes, SimpleNamespace(exp=portable_exp)
    fused.rounded = heads.rounded = portable_rounded
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
    failures += packing_differs() + table_differs() + attention_differs() + norms_differ() + routing_differs()
    print("\n".join([*failures, f"{count + 12} cases, {len(failures)} failures"]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
