"""SGLang's quantization method "minite": every linear of the plan is computed by a miniTE backend.

SGLang's own parameters of these layers are not made. The codes, scales and amaxes that the learner exported are held
packed (sampler/embedded/weights.py) and read by the backend; embedding, norms, router and LM head stay SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from minite.layers import ops
from minite.layers.linear import check_supported
from minite.layers.matmul import quantize_reduced
from minite.sampler.sglang import inside, ranks
from minite.sampler.sglang.experts import forward as forward_experts
from minite.sampler.sglang.names import METHOD
from minite.sampler.sglang.shards import reduction
from minite.sync.names import FUSED


class MiniteConfig(QuantizationConfig):
    """Reads the plan that config.json's ``quantization_config`` names. One per scheduler process."""

    def __init__(self, state: inside.Inside) -> None:
        super().__init__()
        self.state = state

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # the backend has been asked already

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MiniteConfig:
        return cls(inside.start(config["plan"], config["device"], ranks.of_sglang()))

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of one of SGLang's layers; None leaves it to SGLang (embedding and LM head)."""
        if isinstance(layer, FusedMoE):
            return ExpertsMethod(self.state, prefix)
        if isinstance(layer, LinearBase):
            return LinearMethod(self.state, prefix)
        return None


class LinearMethod(LinearMethodBase):
    """A dense linear, possibly fused."""

    def __init__(self, state: inside.Inside, prefix: str) -> None:
        parent, _, last = prefix.rpartition(".")
        self.state = state
        self.linear = state.linear(prefix, [f"{parent}.{part}" for part in FUSED.get(last, (last,))])
        self.reduce_amax = reduction(prefix, state.ranks)
        check_supported("gemm", self.linear.entry, state.backend, self.linear.entry.name)

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Nothing: the weights are in ``linear``."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """At the start: zeros, so that CUDA graphs record the memory that later updates are written to."""
        if self.linear.prepared is None:
            self.linear.prepare(self.state.backend)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [.., K] -> [.., N], the dtype of x."""
        assert bias is None, "no model of miniTE has a bias here"
        backend, how, x_MK = self.state.backend, self.linear.input_operand, x.reshape(-1, x.shape[-1])
        a_MK = quantize_reduced(x_MK, how, backend, self.reduce_amax, self.linear.entry.name, kept=False)
        y_MN = backend.gemm(a_MK, self.linear.prepared, x.dtype)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])


class ExpertsMethod(FusedMoEMethodBase):
    """All experts of a layer: gate and up as one grouped GEMM, down as another."""

    def __init__(self, state: inside.Inside, prefix: str) -> None:
        self.state, self.prefix = state, prefix
        experts = [f"{prefix}.{e}" for e in range(state.plan.model["num_experts"])]
        gate_up = state.expert_linear(f"{prefix}.gate_up_proj", ((f"{e}.gate_proj", f"{e}.up_proj") for e in experts))
        self.linears = (gate_up, state.expert_linear(f"{prefix}.down_proj", ((f"{e}.down_proj",) for e in experts)))
        for linear in self.linears:
            check_supported("grouped_gemm", linear.entry, state.backend, linear.entry.name)
        self.reduce_amax = reduction(self.linears[1].entry.name, state.ranks)

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Nothing: the weights are in ``linears``."""

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """No runner of SGLang's: ``apply`` computes from the standard top-k."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for linear in self.linears:
            if linear.prepared is None:
                linear.prepare(self.state.backend)

    def apply(self, layer: nn.Module, dispatch_output: Any) -> StandardCombineInput:
        x_TH, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        logits_TE, expert_Tk = topk.router_logits, topk.topk_ids
        watch = self.state.watch
        y_TH = forward_experts(self.state.backend, *self.linears, x_TH, logits_TE, expert_Tk, self.reduce_amax, watch)
        return StandardCombineInput(hidden_states=y_TH)


class RouterMethod(UnquantizedLinearMethod):
    """Router logits in FP32 from the operands as they are; SGLang's own would round them to the model's dtype."""

    def __init__(self, state: inside.Inside) -> None:
        self.state = state

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits_TE = ops.wide_linear(x, layer.weight, strict=False, fused=self.state.backend.fused)
        if self.state.watch is not None:
            self.state.watch.op("wide_linear", logits_TE, x, layer.weight)
        return logits_TE
