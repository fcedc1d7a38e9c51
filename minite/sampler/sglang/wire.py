"""A bucket of tensors as one flat tensor and its index: what passes between the engine and its schedulers.

One storage per message, because every storage that crosses a process border costs a file descriptor (CPU) or an IPC
handle (CUDA), and a bucket of experts has thousands of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

VERSION = "#version"  # key of the tensor that opens an update: the WeightVersion as JSON
UNQUANTIZED = "#unquantized"  # beside VERSION: tensors come in the model's dtype, to be quantized on arrival
RECORD = "#record"  # key of the tensor that starts (empty) or ends (a path) the record of quantizer calls
_DATA, _INDEX = "#data", "#index"
_ALIGN = 16  # bytes; the start of every tensor, so that any dtype can view it


def flatten(bucket: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Named tensors of one device -> [data uint8 on that device, index uint8 on the CPU (JSON)]."""
    index, pieces, offset = [], [], 0
    for name, tensor in bucket.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        index.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        padding = -raw.numel() % _ALIGN
        pieces += [raw, raw.new_zeros(padding)]
        offset += raw.numel() + padding
    data = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.uint8)
    return [(_DATA, data), (_INDEX, text(json.dumps(index)))]


def unflatten(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of ``flatten``; the tensors are views of the data."""
    data, tensors = flat[_DATA], {}
    for name, dtype_name, shape, offset in json.loads(bytes(flat[_INDEX].cpu().numpy())):
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = data[offset : offset + size].view(dtype).view(shape)
    return tensors


def text(content: str) -> Tensor:
    """A string as a uint8 tensor."""
    return torch.tensor(list(content.encode()), dtype=torch.uint8)
