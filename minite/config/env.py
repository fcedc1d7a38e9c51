"""The only reader and writer of environment variables.

miniTE itself reads MINITE_CACHE_DIR (without it XDG_CACHE_HOME), and for `minite launch` MINITE_SLIME_DIR and
MINITE_MEGATRON_DIR; whether Weights & Biases' own are set decides if it stays on this machine. What third parties need
for the numerics of a plan is derived from the plan here, for the engines that run them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from minite.config.plan import PlanEntry, PrecisionPlan
from minite.errors import UserError


def cache_dir() -> Path:
    """Where things that can be made again are kept: MINITE_CACHE_DIR, else the user's cache directory."""
    own = os.environ.get("MINITE_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minite"


def slime_dir() -> Path | None:
    """A checkout of slime: MINITE_SLIME_DIR."""
    return _directory("MINITE_SLIME_DIR")


def megatron_dir() -> Path | None:
    """The Megatron-LM that slime shall import: MINITE_MEGATRON_DIR. None = the one that is installed."""
    return _directory("MINITE_MEGATRON_DIR")


def _directory(name: str) -> Path | None:
    own = os.environ.get(name)
    return Path(own) if own else None


def wandb_is_set_up() -> bool:
    """Whether the user has told Weights & Biases where to send a run: WANDB_MODE or WANDB_API_KEY is set."""
    return bool(os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"))


def apply_ray_env() -> None:
    """What Ray must find before it starts on one machine: it and its processes listen on loopback (the variable's name
    tells only where that is Ray's default), where no token file is needed."""
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})


def apply_process_group_env() -> None:
    """What torch's process groups must find: ranks of one machine talk over loopback, unless a user named a network."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def apply_sglang_env(device: str, ranks: int = 1) -> None:
    """What SGLang must find when it is imported, and its processes with it: that there is no GPU to look for.

    ``ranks``: of one engine. Without a binding SGLang wants a NUMA node for each; here they share all processors.
    """
    if device == "cpu":
        os.environ.update({"SGLANG_USE_CPU_ENGINE": "1"})
        if ranks > 1:
            mine = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([mine] * ranks))


def keep_loopback_direct() -> None:
    """What HTTP clients of this process must find: no proxy is asked for this machine."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")  # in the order of those that read them
    direct = given if given == "*" else ",".join(filter(None, [given, "127.0.0.1"]))
    os.environ.update({"no_proxy": direct, "NO_PROXY": direct})


def third_party_env(plan: PrecisionPlan) -> dict[str, str]:
    """Variables under which Transformer Engine, FlashInfer and SGLang compute NVFP4 as the plan says.

    Empty when nothing is NVFP4. Both Transformer Engine and FlashInfer read theirs at import, and for a whole process.
    Raises UserError when the plan mixes choices that they can only make once.
    """
    nvfp4 = [e for e in plan.entries if e.weight.startswith("nvfp4") or e.input.startswith("nvfp4")]
    if not nvfp4:
        return {}
    env = {
        "NVTE_USE_FAST_MATH": "0",  # fast math scales in BF16 and flips 0.35 % of the codes
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",  # approximate reciprocals; two names for two code paths
        "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
        "NVTE_NVFP4_DISABLE_RHT": "1",  # launch.te refuses plans with gradients in NVFP4, which need both
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
        "NVTE_BACKWARD_OVERRIDE": _one_choice("backward", nvfp4, _backward),
    }
    weights = [e for e in nvfp4 if e.weight.startswith("nvfp4")]
    if weights:
        blocks = _one_choice("weight", weights, lambda e: e.weight)
        env["NVTE_NVFP4_DISABLE_2D_QUANTIZATION"] = "0" if blocks == "nvfp4_2d" else "1"
    inputs = [e for e in nvfp4 if e.input.startswith("nvfp4")]
    if inputs:
        by_row = "1" if _one_choice("input", inputs, lambda e: e.input).startswith("nvfp4_row") else "0"
        env["NVTE_NVFP4_ROW_SCALED_ACTIVATION"] = by_row
        env["SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION"] = by_row
    return env | _four_over_six(any(e.weight.endswith("_4o6") for e in weights), inputs[:1])


def _four_over_six(weights: bool, inputs: list[PlanEntry]) -> dict[str, str]:
    """Four over six for weights and inputs, compared as formats.nvfp4 does: MSE, bound 448, exact error."""
    activations = any(e.input.endswith("_4o6") for e in inputs)
    who = {(False, False): "none", (True, False): "weights", (False, True): "activations", (True, True): "all"}
    env = {
        "NVTE_NVFP4_4OVER6": who[weights, activations],
        "FLASHINFER_NVFP4_4OVER6": "1" if activations else "0",  # weights arrive quantized
    }
    if weights or activations:
        for prefix, use_256 in (("NVTE", "none"), ("FLASHINFER", "0")):
            env[f"{prefix}_NVFP4_4OVER6_E4M3_USE_256"] = use_256
            env[f"{prefix}_NVFP4_4OVER6_ERR_MODE"] = "MSE"
            env[f"{prefix}_NVFP4_4OVER6_ERR_USE_FAST_MATH"] = "0"
    return env


def _backward(entry: PlanEntry) -> str:
    if entry.dgrad != entry.wgrad:
        raise UserError(
            f"{entry.rule}: Transformer Engine makes one backward choice per process, but format '{entry.format}' has "
            f"dgrad {entry.dgrad} and wgrad {entry.wgrad}; use one"
        )
    return "dequantized" if entry.dgrad == "dequantized" else "high_precision"  # nvfp4: launch.te refuses it


def _one_choice(what: str, entries: list[PlanEntry], choice: Callable[[PlanEntry], str]) -> str:
    """The choice that all entries share."""
    first = entries[0]
    for entry in entries:
        if choice(entry) != choice(first):
            raise UserError(
                f"{entry.rule}: Transformer Engine makes one {what} choice per process, but '{entry.name}' asks for "
                f"{choice(entry)} and '{first.name}' for {choice(first)}; use one"
            )
    return choice(first)
