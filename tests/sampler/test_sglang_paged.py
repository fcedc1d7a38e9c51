"""Hooks around SGLang's attention on a GPU: its page tables as our kernels want them. The kernels are a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cases import normal
from torch import Tensor

from minite.layers import ops
from minite.sampler.sglang import aligned

PREFIX, NEW = [3, 0, 7], [2, 5, 1]  # tokens that are cached, and tokens that come, of three requests
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3


class Kernels:
    """attention_paged and attention_decode, in the words of backends.base.Fused, by the layer's own attention."""

    def attention_paged(self, q, k_pool, v_pool, cu_queries, prefix_S, first_S, slots, scale):
        out = []
        for s, (prefix, first) in enumerate(zip(prefix_S.tolist(), first_S.tolist(), strict=True)):
            rows = q[cu_queries[s] : cu_queries[s + 1]]
            total = prefix + len(rows)
            at = slots[first : first + total]
            filled = torch.cat([rows.new_zeros(prefix, *rows.shape[1:]), rows])
            whole = ops.attention(filled, k_pool[at], v_pool[at], torch.tensor([0, total]), scale, strict=False)
            out.append(whole[prefix:])
        return torch.cat(out)

    def attention_decode(self, q, k_pool, v_pool, first_B, length_B, scale, slots):
        cu, one = torch.arange(len(q) + 1), length_B - 1
        return self.attention_paged(q, k_pool, v_pool, cu, one, first_B, slots, scale)


@pytest.fixture
def batch(monkeypatch):
    """(q of all tokens, pools, slots of all tokens, starts of the requests, what the learner computes)."""
    monkeypatch.setattr(aligned, "active", lambda: True)
    monkeypatch.setattr(aligned, "fused", Kernels)
    lengths = torch.tensor(PREFIX) + torch.tensor(NEW)
    starts, total = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum())
    q, k, v = (normal(total, h, DIM, seed=i, dtype=torch.float32) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:total]
    pools = [torch.full((50, KV_HEADS, DIM), float("nan")) for _ in range(2)]
    pools[0][slots], pools[1][slots] = k, v
    return q, pools, slots, starts.int(), ops.attention(q, k, v, starts, SCALE, strict=False)


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("SGLang's own attention was called")


def extend(theirs, q: Tensor, pools: list[Tensor], slots: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """As TritonAttnBackend._forward_extend_unified calls it: buffers of offsets are longer than the batch."""
    rows = torch.cat([torch.arange(int(starts[s]) + p, int(starts[s + 1])) for s, p in enumerate(PREFIX)])
    qo = torch.tensor([0, *NEW, -99, -99]).cumsum(0).int()
    out = torch.full_like(q[rows], float("nan"))
    aligned.extend_paged(
        theirs, q[rows], out, *pools, 1.0, 1.0, qo, torch.cat([starts, starts.new_tensor([-7])]), slots,
        torch.tensor(PREFIX).int(), max(NEW), custom_mask=None, mask_indptr=None, sm_scale=SCALE, logit_cap=0.0,
    )  # fmt: skip
    return out, rows


def test_prefill_behind_a_prefix(batch):
    q, pools, slots, starts, wanted = batch
    out, rows = extend(never, q, pools, slots, starts)
    torch.testing.assert_close(out, wanted[rows])


def test_decode(batch):
    q, pools, slots, starts, wanted = batch
    last = starts[1:].long() - 1
    out = torch.full_like(q[last], float("nan"))
    offsets = torch.cat([starts, starts.new_tensor([-7])])
    aligned.decode_paged(never, q[last], *pools, out, offsets, slots, None, None, None, 8, SCALE, 1.0, 1.0, logit_cap=0)
    torch.testing.assert_close(out, wanted[last])


@pytest.mark.parametrize("why", ["no aligned plan", "no kernels", "another dtype", "a pool with gaps", "other heads"])
def test_where_ours_cannot_sglangs_runs(batch, monkeypatch, why):
    q, pools, slots, starts, _ = batch
    if why == "no aligned plan":
        monkeypatch.setattr(aligned, "active", lambda: False)
    elif why == "no kernels":
        monkeypatch.setattr(aligned, "fused", lambda: None)
    elif why == "another dtype":
        pools = [pool.to(torch.float8_e4m3fn) for pool in pools]
    elif why == "a pool with gaps":
        pools = [torch.stack([pool, pool], 1)[:, 0] for pool in pools]
    else:
        refusing = SimpleNamespace(attention_paged=lambda *_: None, attention_decode=lambda *_, **__: None)
        monkeypatch.setattr(aligned, "fused", lambda: refusing)
    calls = []
    extend(lambda *args, **kwargs: calls.append((args, kwargs)), q, pools, slots, starts)
    (args, kwargs), = calls  # fmt: skip
    assert len(args) == 11 and args[2] is pools[0] and args[10] == max(NEW) and kwargs["sm_scale"] == SCALE
    last = starts[1:].long() - 1
    given = (q[last], *pools, q[last], starts, slots, None, None, None, 8, SCALE, 1.0, 1.0)
    aligned.decode_paged(lambda *args, **kwargs: calls.append((args, kwargs)), *given, logit_cap=0)
    assert len(calls[1][0]) == len(given) and all(a is b for a, b in zip(calls[1][0], given, strict=True))
