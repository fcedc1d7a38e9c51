"""A scheduler watched operation by operation, for comparisons with a learner: what the hooks of aligned.py and the
methods note, pass by pass, while decode steps run without their CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Backend
from minite.backends.recording import GemmCall, OpCall, Prepared, RecordingGemms
from minite.formats.qtensor import QTensor
from minite.layers.recording import noted
from minite.sampler.embedded.weights import Linear


@dataclass
class RequestPass:
    """One forward pass: whose token, and which, each row is; and what it called."""

    request_ids: list[str]
    request_N: Tensor  # int64, index into request_ids
    position_N: Tensor  # int64, in the request's prompt and response
    last_B: Tensor | None  # rows that reached the LM head; None = all
    calls: list[OpCall | GemmCall] = field(default_factory=list)


class Watch:
    """What passed since it began. ``backend`` computes as ``inner`` does, and notes GEMMs."""

    def __init__(self, inner: Backend, linears: Sequence[Linear]) -> None:
        self.inner, self._linears = inner, linears
        self.backend = RecordingGemms(inner, self.note)
        self.passes: list[RequestPass] = []
        self.pool: Any = None  # SGLang's KV cache
        self._slot_N = torch.empty(0)  # where in it the rows of the pass under way are
        self._muted = False
        for linear in linears:
            linear.prepared = Prepared(linear.operand(), linear.prepared)

    def end(self, path: str) -> None:
        """Write the passes to a file and put the weights back as they were."""
        for linear in self._linears:
            assert isinstance(linear.prepared, Prepared)
            linear.prepared = linear.prepared.inner
        torch.save(self.passes, path)

    def note(self, call: OpCall | GemmCall) -> None:
        """Keep a copy on the CPU: SGLang overwrites its buffers."""
        if self._muted or not self.passes:
            return
        if isinstance(call, GemmCall):
            rows = {name: part.cpu() for name, part in call.weight.items()}
            call = replace(call, x=_kept(call.x), a=_kept(call.a), weight=rows, out=_kept(call.out))
        else:
            named = (call.inputs, call.outputs, call.internals, call.parameters)
            call = OpCall(call.op, *({name: _kept(x) for name, x in part.items()} for part in named))
        self.passes[-1].calls.append(call)

    def op(self, name: str, out: Any, *args: Any) -> None:
        """Note a shared operation (layers/recording.py)."""
        self.note(noted(name, out, *args))

    def attention(self, layer: int, q_THD: Tensor, out: Tensor) -> None:
        """Note attention of the pass under way, with its own keys and values as the cache holds them."""
        if not self.passes:
            return
        k, v = (self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer))
        self.op("attention", out, q_THD, k[self._slot_N], v[self._slot_N])

    @contextmanager
    def muted(self) -> Iterator[None]:
        """What is called within is part of an operation that is noted as a whole."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def forward(self, sglangs: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """ModelRunner.forward, watched. A decode step computes what its graph would have."""
        self.pool, self._slot_N = runner.token_to_kv_pool, batch.out_cache_loc.long()
        graphs = {name: getattr(runner, name) for name in _GRAPHS if hasattr(runner, name)}
        for name in graphs:
            setattr(runner, name, None)
        self.passes.append(_pass_of(batch))
        try:
            return sglangs(runner, batch, *args, **kwargs)
        finally:
            for name, graph in graphs.items():
                setattr(runner, name, graph)
            self.passes[-1].calls = _shaped(self.passes[-1])


_GRAPHS = ("decode_cuda_graph_runner", "graph_runner")  # of SGLang from 0.5.18 on, and before


def _pass_of(batch: Any) -> RequestPass:
    position_N = batch.positions.cpu().long()
    count = len(batch.rids)
    if batch.forward_mode.is_decode():
        return RequestPass(list(batch.rids), torch.arange(count), position_N[:count], None)
    lengths_B = torch.as_tensor(batch.extend_seq_lens_cpu)
    rows_N = torch.arange(count).repeat_interleave(lengths_B)
    return RequestPass(list(batch.rids), rows_N, position_N[: len(rows_N)], lengths_B.cumsum(0) - 1)


def _shaped(done: RequestPass) -> list[OpCall | GemmCall]:
    """Norms by row of the pass, not by head; of the final one, the rows that the LM head was given."""
    calls, rows = list(done.calls), len(done.position_N)
    norms = [i for i, call in enumerate(calls) if call.op == "rms_norm"]
    for i in norms:
        call = calls[i]
        assert isinstance(call, OpCall)
        x, y = (part.reshape(rows, -1) for part in (call.inputs["x"], call.outputs["y"]))
        if i == norms[-1] and done.last_B is not None:
            x, y = x[done.last_B], y[done.last_B]
        calls[i] = replace(call, inputs={"x": x}, outputs={"y": y})
    return calls


def _kept(x: Any) -> Any:
    if isinstance(x, QTensor):
        return x.to("cpu")
    return x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x
