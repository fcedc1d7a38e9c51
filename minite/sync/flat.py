"""Named tensors as one flat tensor and its index: one copy between devices or processes instead of thousands."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

DATA, INDEX = "#data", "#index"
_ALIGN = 16  # bytes; the start of every tensor, so that any dtype can view it


def flatten(bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors of one device -> {DATA: uint8 on that device, INDEX: uint8 on the CPU (JSON)}."""
    index, pieces, offset = [], [], 0
    for name, tensor in bucket.items():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        index.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        pieces.append(raw)
        if padding := -raw.numel() % _ALIGN:
            pieces.append(raw.new_zeros(padding))
        offset += raw.numel() + padding
    data = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.uint8)
    return {DATA: data, INDEX: text(json.dumps(index))}


def unflatten(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of ``flatten``; the tensors are views of the data."""
    data, tensors = flat[DATA], {}
    for name, dtype_name, shape, offset in json.loads(bytes(flat[INDEX].cpu().numpy())):
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = data[offset : offset + size].view(dtype).view(shape)
    return tensors


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same on the CPU, contiguous. Those of a device, which must all be of one, come in one copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    flat = flatten(tensors)
    return unflatten({DATA: flat[DATA].cpu(), INDEX: flat[INDEX]})


def text(content: str) -> Tensor:
    """A string as a uint8 tensor."""
    return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8) if content else torch.zeros(0).byte()
