"""Hugging Face safetensors directories: read into a model, written from one. Streaming, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minite.errors import UserError
from minite.models.weight_ops import WeightMap

FILE_BYTES = 4 << 30  # per safetensors file, as the hub's own checkpoints


class HFReader:
    """The tensors of a directory by name. Raises UserError when it holds none, or not the one that is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"model.checkpoint: {self.path} has no *.safetensors file; give a Hugging Face model directory"
            )
        try:
            self._files = {f: safe_open(f, framework="pt") for f in files}
        except SafetensorError as error:
            raise UserError(f"model.checkpoint: {self.path} has a damaged file ({error}); copy it again") from None
        self._home = {name: handle for handle in self._files.values() for name in handle.keys()}  # noqa: SIM118 not a dict

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor of the expected shape, on the CPU, in the dtype of the file."""
        if name not in self._home:
            raise UserError(f"model.checkpoint: {self.path} has no tensor {name}; is it the model of this recipe?")
        tensor = self._home[name].get_tensor(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise UserError(
                f"model.checkpoint: {self.path}: {name} is {list(tensor.shape)} {tensor.dtype}, but the recipe's model "
                f"needs {list(shape)} in BF16 or FP32"
            )
        return tensor


def initial_tensor(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Random start of one HF parameter, float32: 1 for norms, else normal(0, std) by seed and name alone."""
    if len(shape) == 1:
        return torch.ones(shape)
    # A digest, because torch's CPU generator looks at the low 32 bits of a seed only.
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def write(
    directory: str | Path, named: Iterable[tuple[str, Tensor]], ops: WeightMap, hf_config: dict[str, Any], keep: bool
) -> None:
    """Write full megatron parameters as an HF directory. Where ``keep`` is False the parameters are only drained."""
    directory = Path(directory)
    index: dict[str, str] = {}
    part: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal part, size
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(part, directory / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, name))
        part, size = {}, 0

    if keep:
        directory.mkdir(parents=True, exist_ok=True)
    for name, full in named:
        for hf_name, tensor in ops.to_hf(name, full) if keep else []:
            part[hf_name] = tensor.cpu().clone().contiguous()
            size += tensor.numel() * tensor.element_size()
            if size >= FILE_BYTES:
                flush()
    if keep:
        flush()
        weight_map = {"metadata": {}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(weight_map, indent=1))
        (directory / "config.json").write_text(json.dumps(hf_config, indent=1))
