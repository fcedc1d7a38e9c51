"""NVFP4 checkpoints on disk in NVIDIA ModelOpt's layout, and the conversion from and to BF16.

Per quantized linear X: ``X.weight`` uint8 [N, K/2], ``X.weight_scale`` float8_e4m3fn [N, K/16], ``X.weight_scale_2``
float32 [] = amax / 2688 of the fusion group, ``X.input_scale`` float32 []. Written are the tensors that a sampler
would be sent (``export.pack``), so online and offline codes cannot differ. The exact ``X.weight_amax`` lie in
``minite_amax.safetensors``, outside the index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.errors import UserError
from minite.formats import QTensor
from minite.formats.nvfp4 import OUTER_MAX
from minite.models import get_model
from minite.sync.checkpoint import INDEX, Checkpoint, CheckpointWriter
from minite.sync.export import FormatQuantizer, pack
from minite.sync.stored import MODEL_DTYPES, from_parts

AMAX_FILE = "minite_amax.safetensors"
INPUT_SCALE = 1.0  # no calibrated value: miniTE scales activations as it meets them, per token or per call
_REWRITTEN = {"config.json", "hf_quant_config.json", INDEX}  # all other small files are copied

Progress = Callable[[int, int], None]  # (tensors read, tensors in all)


def convert(
    source: str | Path, target: str | Path, config: RunConfig, to: str = "nvfp4", progress: Progress | None = None
) -> None:
    """Convert a checkpoint directory, streaming; ``target`` appears whole or not at all.

    Args:
        config: recipe of the model; for "nvfp4" its precision plan says what is quantized and how.
        to: "nvfp4" (from BF16 or FP32) or "bf16" (from NVFP4).

    Raises:
        UserError: for a source that is not the recipe's model, a target that exists, a plan ModelOpt cannot express.
    """
    reader = Checkpoint(source)
    with CheckpointWriter(target) as writer:
        hf_config = _read_json(reader.directory / "config.json")
        if to == "nvfp4":
            _to_nvfp4(reader, writer, config, hf_config, progress)
        else:
            _to_bf16(reader, writer, config, hf_config, progress)
        for file in sorted(reader.directory.iterdir()):
            if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model") and file.name not in _REWRITTEN:
                writer.copy(file)


def _to_nvfp4(
    reader: Checkpoint,
    writer: CheckpointWriter,
    config: RunConfig,
    hf_config: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    plan, shapes = resolve_plan(config), get_model(config.model.kind).hf_tensors(config.model)
    quantization = quantization_config(plan)
    extra = sorted(reader.names - shapes.keys())
    if extra:
        raise UserError(f"{reader.directory}: {extra[0]} is not a tensor of the recipe's model in BF16")

    def named() -> Iterator[tuple[str, Tensor]]:
        for i, name in enumerate(shapes):
            yield name, reader.read(name).to(MODEL_DTYPES[config.model.dtype])
            if progress is not None:
                progress(i + 1, len(shapes))

    amaxes: dict[str, Tensor] = {}
    for _, tensors in pack(plan, named(), FormatQuantizer(), shapes=shapes):
        for name, tensor in tensors.items():
            module, _, suffix = name.rpartition(".")
            if suffix == "weight_amax":
                amaxes[name] = tensor.clone()  # members of a group share one tensor, which safetensors refuses
                writer.add(f"{module}.weight_scale_2", outer_scale(tensor))
                writer.add(f"{module}.input_scale", torch.tensor(INPUT_SCALE))
            else:
                writer.add(name, tensor)
    writer.write_beside(AMAX_FILE, amaxes)
    writer.write_json("config.json", {**hf_config, "quantization_config": quantization})
    writer.write_json("hf_quant_config.json", _hf_quant_config(quantization))


def _to_bf16(
    reader: Checkpoint,
    writer: CheckpointWriter,
    config: RunConfig,
    hf_config: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    shapes, dtype = get_model(config.model.kind).hf_tensors(config.model), MODEL_DTYPES[config.model.dtype]
    for i, (name, shape) in enumerate(shapes.items()):
        tensor = reader.read(name)
        if tensor.dtype == torch.uint8:
            tensor = read_quantized(reader, name.removesuffix(".weight")).dequantize(dtype)
        if tuple(tensor.shape) != shape:
            raise UserError(f"{reader.directory}: {name} is {list(tensor.shape)}; the recipe's model has {list(shape)}")
        writer.add(name, tensor.to(dtype))
        if progress is not None:
            progress(i + 1, len(shapes))
    writer.write_json("config.json", {k: v for k, v in hf_config.items() if k != "quantization_config"})


def outer_scale(amax: Tensor) -> Tensor:
    """ModelOpt's ``weight_scale_2``: amax / 2688 in float32, and 1 for a tensor of zeros, as SGLang expects."""
    return torch.where(amax == 0, torch.ones_like(amax), amax / torch.full_like(amax, OUTER_MAX))


def read_quantized(reader: Checkpoint, module: str) -> QTensor:
    """One linear of a ModelOpt checkpoint.

    The amax is the one recorded beside it; a checkpoint made elsewhere has none, and weight_scale_2 * 2688 stands in,
    which may be off by one float32 rounding.
    """
    amax_name = f"{module}.weight_amax"
    exact = amax_name in reader.names
    amax = reader.read(amax_name) if exact else reader.read(f"{module}.weight_scale_2").float() * OUTER_MAX
    parts = {"weight": reader.read(f"{module}.weight"), "weight_scale": reader.read(f"{module}.weight_scale")}
    return from_parts("nvfp4_1d", {**parts, "weight_amax": amax.reshape(())})


def quantization_config(plan: PrecisionPlan) -> dict[str, Any]:
    """``quantization_config`` of config.json. UserError for a plan that ModelOpt's layout cannot express."""
    quantized = [e for e in plan if e.quantized]
    other = [e for e in quantized if not e.weight.startswith("nvfp4") or not e.input.startswith(("nvfp4", "bf16"))]
    if not quantized or other:
        what = f"{other[0].name} is {other[0].weight} x {other[0].input}" if other else "nothing is quantized"
        raise UserError(f"this plan has no ModelOpt NVFP4 layout: {what}; use a w4a4 or w4a16 recipe")
    inputs = {"bf16" if e.input == "bf16" else "nvfp4" for e in quantized}
    if len(inputs) > 1:
        raise UserError("this plan has no ModelOpt NVFP4 layout: some inputs are NVFP4 and some BF16; use one of them")
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": fp4, "targets": ["Linear"]}
    if inputs == {"nvfp4"}:
        group["input_activations"] = fp4
    result: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": [e.name for e in plan if not e.quantized],
        "quant_algo": "NVFP4" if inputs == {"nvfp4"} else "W4A16_NVFP4",
        "producer": {"name": "minite"},
        "quant_method": "modelopt",
    }
    if plan.kv_cache == "fp8":
        result["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return result


def _hf_quant_config(quantization: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "producer": quantization["producer"],
        "quantization": {
            "quant_algo": quantization["quant_algo"],
            "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in quantization else None,
            "group_size": 16,
            "exclude_modules": quantization["ignore"],
        },
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); expected the checkpoint's config.json") from None
