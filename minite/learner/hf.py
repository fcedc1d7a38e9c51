"""Parameters by Hugging Face name: from a directory of the recipe's model or at random, and back to a directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from minite.config import RunConfig
from minite.errors import UserError
from minite.models.hf_config import read_hf_config, write_hf_config
from minite.models.weight_ops import WeightMap
from minite.sync.checkpoint import Checkpoint, CheckpointWriter
from minite.sync.names import SCHEMES
from minite.sync.tensor_file import PLAIN

# Settings of the model in which a checkpoint may differ: they change where training starts or ends, not the policy.
_FREE = {"dtype", "checkpoint", "init_std", "max_seq_len"}

_SCALES = tuple(scheme.block for scheme in SCHEMES)  # endings of tensors that a quantized checkpoint has

Read = Callable[[str, tuple[int, ...]], Tensor]  # (name, expected shape) -> tensor on the CPU, in the dtype of the file


def reader(path: str | Path, config: RunConfig) -> Read:
    """How to read the parameters of a directory that holds the recipe's model.

    Raises UserError, here or at a read, for a directory that is none, another model, a missing or unfit tensor.
    """
    try:
        directory = Checkpoint(path)
    except UserError as error:
        raise UserError(f"model.checkpoint: {error}") from None
    _check_same_model(Path(path) / "config.json", config)
    quantized = next((name for name in sorted(directory.names) if name.endswith(_SCALES)), None)
    if quantized:
        raise UserError(
            f"model.checkpoint: {path} is quantized already: it holds {quantized}; expected BF16 or FP32, which "
            f"minite convert {path} DST --to bf16 makes of it"
        )

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        slot = directory.slot(name)
        if slot.shape != shape or slot.dtype not in PLAIN:
            raise UserError(
                f"model.checkpoint: {path}: {name} is {list(slot.shape)} {slot.dtype}, but the recipe's model "
                f"needs {list(shape)} in BF16 or FP32"
            )
        return directory.read(name)

    return read


def _check_same_model(file: Path, config: RunConfig) -> None:
    """Equal shapes are not enough: with another rope_theta the same weights are another policy."""
    written = read_hf_config(file)
    for name, wanted in vars(config.model).items():
        got = getattr(written, name)
        if name not in _FREE and got != wanted:
            where = config.where(f"model.{name}")
            raise UserError(
                f"{where}: model.{name} is {wanted!r}, but {file} says {got!r}; "
                f"set model.{name}: {got} or give the checkpoint of this model"
            )


def initial_tensor(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Random start of one HF parameter, float32: 1 for norms, else normal(0, std) by seed and name alone."""
    if len(shape) == 1:
        return torch.ones(shape)
    # A digest, because torch's CPU generator looks at the low 32 bits of a seed only.
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def write(path: str | Path, named: Iterable[tuple[str, Tensor]], ops: WeightMap, config: RunConfig) -> None:
    """Write full megatron parameters as an HF directory, which must be new."""
    with CheckpointWriter(path) as writer:
        for name, full in named:
            for hf_name, tensor in ops.to_hf(name, full):
                # A copy: parameters share one buffer, and parts of one parameter share its memory.
                writer.add(hf_name, tensor.clone())
        writer.write_json("config.json", write_hf_config(config.model))
