"""What slime imports and a CPU machine has not: as little of it as slime's own code needs to be imported and called.

Nothing here imitates behaviour that a test is about. slime and Megatron-LM themselves are real.
"""

from __future__ import annotations

import argparse
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Of sglang 0.5.15.post1's ServerArgs: the flags that minite launch writes, and those that slime's validation reads.
SGLANG_FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--mem-fraction-static",), {"type": float}),
    (("--max-running-requests",), {"type": int}),
    (("--kv-cache-dtype",), {"choices": ["auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"]}),
    (("--enable-fp32-lm-head",), {"action": "store_true"}),
    (("--moe-runner-backend",), {"type": str}),
    (("--load-format",), {"type": str}),
    (("--dtype",), {"choices": ["auto", "half", "float16", "bfloat16", "float", "float32"]}),
    (("--attention-backend",), {"type": str}),
    (("--sampling-backend",), {"type": str}),
    (("--grammar-backend",), {"type": str}),
    (("--max-total-tokens",), {"type": int}),
    (("--context-length",), {"type": int}),
    (("--cuda-graph-max-bs-decode",), {"type": int}),
    (("--disable-prefill-cuda-graph",), {"action": "store_true"}),
    (("--enable-deterministic-inference",), {"action": "store_true"}),
    (("--tensor-parallel-size", "--tp-size"), {"dest": "tp_size", "type": int, "default": 1}),
    (("--data-parallel-size", "--dp-size"), {"dest": "dp_size", "type": int, "default": 1}),
    (("--pipeline-parallel-size", "--pp-size"), {"dest": "pp_size", "type": int, "default": 1}),
    (("--expert-parallel-size", "--ep-size"), {"dest": "ep_size", "type": int, "default": 1}),
    (("--moe-data-parallel-size", "--moe-dp-size"), {"dest": "moe_dp_size", "type": int, "default": 1}),
)


class ServerArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for names, settings in SGLANG_FLAGS:
            parser.add_argument(*names, **settings)


class RouterArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, **_: Any) -> None:
        parser.add_argument("--router-log-level", default="warn")


def install(slime_dir: Path, megatron_dir: Path | None) -> None:
    """Makes slime importable in this process. For processes of their own: sys.modules keeps the stand-ins."""
    sys.path[:0] = [str(path) for path in (slime_dir, megatron_dir) if path is not None]
    _module("sglang.srt.server_args", ServerArgs=ServerArgs)
    _module("sglang_router.launch_router", RouterArgs=RouterArgs)
    sys.modules["sglang_router"].__version__ = "0.3.2-slime"
    # Megatron imports triton kernels for a mode that is off here.
    kernels = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    kernels.enable_batch_invariant_mode = kernels.is_batch_invariant_mode_enabled = lambda *_: False
    sys.modules[kernels.__name__] = kernels


def _module(name: str, **content: Any) -> None:
    """A module and the packages around it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        module.__path__ = []
    vars(module).update(content)


def install_actor() -> None:
    """What slime's actor and its weight updaters import beside that; none of it is called in the tests."""
    _module("sglang.srt.utils", MultiprocessingSerializer=object)
    _module("sglang.srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
    _module("sglang.srt.weight_sync.tensor_bucket", FlattenedTensorBucket=object)
    # Megatron with slime's patches takes its buffers within such a region.
    region = lambda **_: nullcontext()  # noqa: E731
    _module("torch_memory_saver", torch_memory_saver=types.SimpleNamespace(region=region))


def cpu_accelerator() -> Any:
    """A CPU through slime's own interface for accelerators: the methods that training calls."""
    import torch
    from slime.utils.accelerator.base import Accelerator

    class Cpu(Accelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def is_available(self) -> bool:
            return True

        def device(self, index: Any = None) -> torch.device:
            return torch.device("cpu")

        def device_name(self, index: Any = None) -> str:
            return "cpu"

        def set_device(self, index: Any) -> None: ...

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def synchronize(self, device: Any = None) -> None: ...

        def current_stream(self, device: Any = None) -> None: ...

        def empty_cache(self) -> None: ...

        def mem_get_info(self, device: Any = None) -> tuple[int, int]:
            return 1 << 30, 1 << 30

        def memory_allocated(self, device: Any = None) -> int:
            return 0

        memory_reserved = memory_allocated

    return Cpu()


def unpin_memory() -> None:
    """Page-locked memory needs CUDA; slime asks for it in its backups of weights and of routed experts."""
    import torch

    real = torch.empty_like
    torch.empty_like = lambda *args, pin_memory=False, **kwargs: real(*args, **kwargs)
