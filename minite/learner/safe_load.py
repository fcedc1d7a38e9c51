"""Reading megatron's distributed checkpoints without running what is in them.

torch unpickles the list of parts (`.metadata`) and every part that is no tensor as they come, and a pickle can call any
function. Here a list may only name torch's own classes for it, and parts are read as weights: tensors, numbers, lists.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

_NAMED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for everything that the list of parts has no need of."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _NAMED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self) -> Metadata:
        with Path(self.path, ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"the list of parts is a {type(metadata).__name__}")
        return metadata


class _Planner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


class SafeLoad(TorchDistLoadShardedStrategy):
    """Megatron's torch_dist format, read as its own strategy does, by the classes above."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> dict[str, Any]:
        tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        by_key, places, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, is_loading=True)
        planner = _Planner(shapes_validation_sharded_tensors=tensors)
        dcp.load(state, storage_reader=_Reader(checkpoint_dir), planner=planner)
        loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, places, renamed)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded
