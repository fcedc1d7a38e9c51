"""Noted calls of forward passes -> one trace by token: what every operation of a model did to every token.

Rows of a pass are packed tokens in an order of its own (a learner's microbatch, a prefill, a decode step); ``Rows``
says which token each is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minite.backends.recording import GemmCall, OpCall, parts
from minite.config.schema import ModelConfig
from minite.diagnostics.layerwise import Observed
from minite.formats.rounding import round_once
from minite.models import get_model
from minite.sync.stored import MODEL_DTYPES

KINDS = {
    "rms_norm": "norm",
    "gemm": "GEMM: sums of equal operands",
    "grouped_gemm": "GEMM: sums of equal operands",
    "apply_rope": "RoPE",
    "kv_cache": "KV cache",
    "attention": "attention: sums over equal q, k, v",
    "wide_linear": "GEMM: sums of equal operands",
    "route_topk": "router choice",
    "swiglu": "SwiGLU",
    "moe_combine": "combine order",
}
_BY_EXPERT = {"grouped_gemm", "swiglu", "moe_combine"}  # in an MoE layer: rows are (token, expert) pairs


@dataclass(frozen=True)
class Rows:
    """Which token of the batch a row of a pass is. A row may be several tokens: equal prompts share their prefill."""

    token_N: Tensor  # int64, index into the batch's token axis
    row_N: Tensor  # int64, row of the pass
    last_B: Tensor | None = None  # rows that reach the final norm and the LM head; None = all

    def final(self) -> Rows:
        """The same for the rows behind the last layer."""
        if self.last_B is None:
            return self
        place_n, column_n = (self.row_N[:, None] == self.last_B[None]).nonzero(as_tuple=True)
        return Rows(self.token_N[place_n], column_n)


@dataclass
class Pass:
    """The calls of one forward pass, in order."""

    rows: Rows
    calls: list[OpCall | GemmCall] = field(default_factory=list)


def names(model: ModelConfig) -> dict[str, list[str]]:
    """Operation -> what its first, second, ... call in a pass is."""
    norm, moe = get_model(model.kind).qk_norm, model.num_experts > 0
    found: dict[str, list[str]] = {op: [] for op in KINDS}
    for i in range(model.num_layers):
        layer = f"model.layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        heads = [f"{attn}.q_norm", f"{attn}.k_norm"] if norm else []
        found["rms_norm"] += [f"{layer}.input_layernorm", *heads, f"{layer}.post_attention_layernorm"]
        found["gemm"] += [f"{attn}.qkv_proj", f"{attn}.o_proj"]
        found["apply_rope"] += [f"{attn}.q_rope", f"{attn}.k_rope"]
        found["attention"].append(f"{attn}.attention")
        found["swiglu"].append(f"{mlp}.experts.swiglu" if moe else f"{mlp}.swiglu")
        if moe:
            found["wide_linear"].append(f"{mlp}.gate")
            found["route_topk"].append(f"{mlp}.router")
            found["grouped_gemm"] += [f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"]
            found["moe_combine"].append(f"{mlp}.experts.combine")
        else:
            found["gemm"] += [f"{mlp}.gate_up_proj", f"{mlp}.down_proj"]
    found["rms_norm"].append("model.norm")
    found["wide_linear"].append("lm_head")
    return found


def assemble(passes: Sequence[Pass], model: ModelConfig, tokens: int, megatron: bool) -> list[Observed]:
    """The trace of a batch of ``tokens`` tokens. ``megatron``: rows of fused q, k, v lie in megatron's order."""
    trace: dict[str, Observed] = {}
    layout = qkv_rows(model) if megatron else None
    for done in passes:
        for module, call in _named(done.calls, model, layout):
            rows = done.rows.final() if module in ("model.norm", "lm_head") else done.rows
            _add(trace, module, call, rows, tokens)
    return list(trace.values())


def _named(
    calls: Sequence[OpCall | GemmCall], model: ModelConfig, layout: Tensor | None
) -> Iterator[tuple[str, OpCall]]:
    """Calls of one pass with their modules, rows by token, and the KV cache as an operation of its own."""
    known, count = names(model), Counter[str]()
    key = value = torch.empty(0)
    expert_Tk = None
    for noted in calls:
        module = known[noted.op][count[noted.op]]
        count[noted.op] += 1
        if isinstance(noted, GemmCall):
            call = _gemm(noted, MODEL_DTYPES[model.dtype], layout if module.endswith(".qkv_proj") else None)
        else:
            call = noted
        if module.endswith(".qkv_proj"):
            value = call.outputs["y"][:, -model.num_kv_heads * model.head_dim :].unflatten(-1, (-1, model.head_dim))
        elif module.endswith(".k_rope"):
            key = call.outputs["y"]
        elif call.op == "attention":
            held = {"key": call.inputs["k"], "value": call.inputs["v"]}
            yield module.replace(".attention", ".kv_cache"), OpCall("kv_cache", {"key": key, "value": value}, held)
        elif call.op == "route_topk":
            expert_Tk = call.outputs["experts"]
        elif expert_Tk is not None and call.op in _BY_EXPERT:
            call = _by_token(call, expert_Tk)
        yield module, call
    assert all(count[op] == len(wanted) for op, wanted in known.items() if op != "kv_cache"), dict(count)


def _by_token(call: OpCall, expert_Tk: Tensor) -> OpCall:
    """Rows sorted by expert -> [T, k, ...], experts ascending; which experts is one of the inputs."""
    tokens, k = expert_Tk.shape
    slot_R = expert_Tk.flatten().argsort(stable=True)
    order_R = (slot_R // k).argsort(stable=True)  # experts of one token stay ascending

    def moved(named: dict[str, Tensor]) -> dict[str, Tensor]:
        pairs = tokens * k
        return {n: x[order_R].unflatten(0, (tokens, k)) if len(x) == pairs else x for n, x in named.items()}

    outputs = call.outputs if call.op == "moe_combine" else moved(call.outputs)  # it has tokens again
    inputs = moved(call.inputs) | {"experts": expert_Tk.sort(dim=-1).values}
    return OpCall(call.op, inputs, outputs, moved(call.internals), call.parameters)


def _gemm(call: GemmCall, dtype: torch.dtype, layout_N: Tensor | None) -> OpCall:
    """A GEMM with its operands taken apart, its result in the model's dtype: megatron's row-parallel linears round
    theirs after the sum over ranks. ``layout_N``: order in which to read the rows of the weight."""
    rows = len(call.x)
    internals = {f"input {part}": x.expand(rows) if x.ndim == 0 else x for part, x in parts(call.a).items()}
    weight = {f"weight {part}".strip(): x for part, x in call.weight.items()}
    out = round_once(call.out, dtype) if call.out.dtype == torch.float64 else call.out.to(dtype)
    if layout_N is not None:
        out = out[:, layout_N]
        weight = {name: x[layout_N] if x.ndim == 1 else x for name, x in weight.items()}
    if isinstance(call.a, Tensor):
        internals = {}  # the input itself
    return OpCall(call.op, {"x": call.x}, {"y": out}, internals, {"input operand": call.how, **weight})


def _add(trace: dict[str, Observed], module: str, call: OpCall, rows: Rows, tokens: int) -> None:
    """Put the rows of one call to their tokens."""
    if module not in trace:
        parameters = {n: _plain(p) if isinstance(p, Tensor) else p for n, p in call.parameters.items()}
        context = ("k", "v") if call.op == "attention" else ()
        seen_T = torch.zeros(tokens, dtype=torch.bool)
        trace[module] = Observed(module, KINDS[call.op], seen_T, parameters=parameters, context=context)
    seen = trace[module]
    for mine, theirs in ((seen.inputs, call.inputs), (seen.internals, call.internals), (seen.outputs, call.outputs)):
        for name, x in theirs.items():
            x = _plain(x).flatten(1) if x.ndim > 1 else _plain(x)
            if name not in mine:
                mine[name] = torch.zeros(tokens, *x.shape[1:], dtype=x.dtype)
            mine[name][rows.token_N] = x[rows.row_N]
    seen.seen_T[rows.token_N] = True


def _plain(x: Tensor) -> Tensor:
    """On the CPU, narrow floats as FP32: exact, and engines that hold one value in two dtypes compare equal."""
    x = x.detach().cpu()
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def qkv_rows(model: ModelConfig) -> Tensor:
    """int64 [N]: where in megatron's fused q, k, v each row of q, then k, then v lies."""
    ops = get_model(model.kind).megatron_ops(model)
    rows = torch.arange((model.num_heads + 2 * model.num_kv_heads) * model.head_dim)[:, None]
    return torch.cat(
        [part for _, part in ops.to_hf("decoder.layers.0.self_attention.linear_qkv.weight", rows)]
    ).squeeze(-1)
