"""Stands in for SGLang's model in tests: the parameters that SGLang holds itself, its vocabulary padded at the end."""

from __future__ import annotations

import torch
from torch import nn

from minite.config import RunConfig, resolve_plan
from minite.sampler.sglang.inside import Inside
from minite.sampler.sglang.names import expected_modules
from minite.sampler.sglang.ranks import Ranks
from minite.sync.flat import flatten
from minite.sync.names import FUSED
from minite.sync.stored import stored_model

PADDING = 24  # tokens
ALONE = Ranks()


class PlainModel(nn.Module):
    """Parameters by dotted name, without the modules."""

    def __init__(self, state: Inside) -> None:
        super().__init__()
        held = {name for linear in state.weights.linears for name in linear.views}
        self.held = {}
        for name, stored in state.weights.stored.items():
            if name not in held:
                padded = len(stored.shape) == 2 and "mlp.gate" not in name
                rows = (stored.shape[0] + PADDING) // state.ranks.size if padded else stored.shape[0]
                shape = (rows, *stored.shape[1:])
                self.held[name] = nn.Parameter(torch.full(shape, 7.0, dtype=stored.dtype), requires_grad=False)

    def named_parameters(self, *args, **kwargs):
        return iter(self.held.items())


def build(cfg: RunConfig, ranks: Ranks = ALONE) -> tuple[Inside, PlainModel]:
    """A scheduler's state with every module that SGLang would ask for, and the model beside it."""
    plan = resolve_plan(cfg)
    state = Inside(plan, "cpu", ranks)
    for module in expected_modules(plan):
        parent, _, last = module.rpartition(".")
        parts = FUSED.get(last, (last,))
        if parent.endswith(".experts"):
            experts = range(cfg.model.num_experts)
            state.expert_linear(module, [tuple(f"{parent}.{e}.{part}" for part in parts) for e in experts])
        else:
            state.linear(module, [f"{parent}.{part}" for part in parts])
    state.prepare()
    assert stored_model(plan, cfg.model).keys() == state.weights.stored.keys()
    return state, PlainModel(state)


def send(state: Inside, model: PlainModel, *buckets: dict) -> None:
    for bucket in buckets:
        state.receive(model, flatten(bucket))
