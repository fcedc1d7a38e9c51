"""What a watched scheduler notes, without SGLang around it: rows by request and position, weights back afterwards."""

from types import SimpleNamespace

import torch
from plain_model import build, send
from test_sglang_inside import opening
from tiny_engine import MOE, config, shipment

from minite.backends.recording import row_hash
from minite.driver.gap.layers import request_rows
from minite.sampler.sglang.experts import forward
from minite.sampler.sglang.watching import RequestPass


def batch(ids, positions, lengths=None):
    mode = SimpleNamespace(is_decode=lambda: lengths is None)
    slots = torch.arange(len(positions), dtype=torch.int32)
    return SimpleNamespace(
        rids=ids, positions=torch.tensor(positions), extend_seq_lens_cpu=lengths, forward_mode=mode, out_cache_loc=slots
    )


def test_a_watched_pass_and_the_weights_afterwards(tmp_path):
    cfg = config(MOE, "w4a4")
    state, model = build(cfg)
    buckets, version = shipment(cfg)
    send(state, model, opening(version), *buckets)
    before, backend = [linear.prepared for linear in state.weights.linears], state.backend
    gate_up, down = (linear for linear in state.weights.linears if linear.grouped and ".0." in linear.entry.name[:16])
    x_TH, logits_TE = torch.randn(5, 64).bfloat16(), torch.randn(5, 4)
    expert_Tk = logits_TE.topk(2).indices
    expected = forward(backend, gate_up, down, x_TH, logits_TE, expert_Tk)
    graph = object()
    runner = SimpleNamespace(token_to_kv_pool=None, decode_cuda_graph_runner=graph)

    def model_forward(runner, given):
        assert runner.decode_cuda_graph_runner is None
        state.watch.op("rms_norm", x_TH, x_TH, torch.ones(64), 1e-6)
        return forward(state.backend, gate_up, down, x_TH, logits_TE, expert_Tk, None, state.watch)

    state._watch("")
    got = state.watch.forward(model_forward, runner, batch(["a", "b"], [3, 4, 0, 1, 2], [2, 3]))
    state._watch(str(tmp_path / "passes.pt"))
    assert torch.equal(got, expected) and runner.decode_cuda_graph_runner is graph
    assert state.watch is None and state.backend is backend
    assert all(linear.prepared is old for linear, old in zip(state.weights.linears, before, strict=True))
    (seen,) = torch.load(tmp_path / "passes.pt", weights_only=False)
    ops = ["rms_norm", "route_topk", "grouped_gemm", "swiglu", "grouped_gemm", "moe_combine"]
    assert [call.op for call in seen.calls] == ops
    assert seen.last_B.tolist() == [1, 4] and torch.equal(seen.calls[0].inputs["x"], x_TH[[1, 4]])
    assert torch.equal(seen.calls[2].weight["codes"], row_hash(gate_up.buffers["weight"]))


def test_rows_find_their_tokens_and_a_step_too_many_is_nobodys():
    seen = RequestPass(["a", "b"], torch.tensor([0, 1, 1]), torch.tensor([7, 0, 1]), None)
    rows = request_rows(seen, {"a": 10, "b": 3}, {"a": 7, "b": 5})
    assert rows.token_N.tolist() == [3, 4] and rows.row_N.tolist() == [1, 2]


def test_a_row_hash_sees_every_bit_and_place():
    x = torch.randint(0, 256, (3, 8, 16), dtype=torch.uint8)
    changed, swapped = x.clone(), x.clone()
    changed[1, 2, 3] ^= 1
    swapped[2, 5, :2] = x[2, 5, :2].flip(0) if x[2, 5, 0] != x[2, 5, 1] else x[2, 5, :2] + 1
    for other, at in ((changed, [1, 2]), (swapped, [2, 5])):
        assert (row_hash(other) != row_hash(x)).nonzero().tolist() == [at]
    w = torch.randn(4, 6).bfloat16()
    assert torch.equal(row_hash(w), row_hash(w.float())) and row_hash(w).shape == (4,)
