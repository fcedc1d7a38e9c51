"""slime's colocated weight updater, for engines that compute by miniTE's quantization method.

The learner's bytes travel in miniTE's own messages (sync/flat.py, sampler/sglang/wire.py) through slime's: every tensor
that slime sends becomes part of one, the first says which weights these are, the last one their digests. After the
update every scheduler process must prove that it runs the plan and holds these bytes; otherwise training stops.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from minite.config import PrecisionPlan
from minite.errors import UserError
from minite.sampler.sglang import proof
from minite.sampler.sglang.wire import VERSION
from minite.sync.flat import flatten, text
from minite.sync.transport import MANIFEST
from minite.sync.verify import Digest
from minite.types import WeightVersion

Named = list[tuple[str, Tensor]]


class Framed:
    """slime's iterator over converted weights, with a first and a last message around it."""

    def __init__(self, iterator: Any, plan: PrecisionPlan) -> None:
        self._iterator, self._plan = iterator, plan
        self.step = 0
        self.version: WeightVersion | None = None  # of the weights sent last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def get_hf_weight_chunks(self, weights: Any, **options: Any) -> Iterator[Named]:
        """The messages of an update, on every rank alike.

        The weights are converted twice: the first message names the digest of what follows, and to keep all of it
        would take the memory of a second model.
        """
        digest = Digest()
        for chunk in self._iterator.get_hf_weight_chunks(weights, **options):
            digest.update_many(dict(chunk))
        self.version = WeightVersion(self.step, self._plan.digest, digest.hexdigest())
        yield [(VERSION, text(json.dumps(asdict(self.version))))]
        yield from self._iterator.get_hf_weight_chunks(weights, **options)
        yield [(MANIFEST, text(json.dumps(digest.parts, sort_keys=True)))]


def proving(updater: type[Any], plan: PrecisionPlan, backend: str) -> type[Any]:
    """A subclass whose engines prove themselves after every update."""

    class Proving(updater):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._hf_weight_iterator = Framed(self._hf_weight_iterator, plan)

        def update_weights(self) -> None:
            if self._expert_transfer_plan or self.use_distribute:
                raise UserError(
                    "slime.quantization minite: slime would send experts apart from the rest, or to engines on GPUs of "
                    "their own; use colocated engines without --sglang-ep-size"
                )
            self._hf_weight_iterator.step = self.weight_version + 1
            super().update_weights()
            if self.rank == 0:
                check_engines(self.rollout_engines, plan, backend, self._hf_weight_iterator.version)

        def _send_hf_params(self, hf_named_tensors: Named) -> Any:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            flat = [(name, tensor.to(device)) for name, tensor in flatten(dict(hf_named_tensors)).items()]
            return super()._send_hf_params(flat)

    Proving.__name__ = Proving.__qualname__ = f"Proving{updater.__name__}"
    return Proving


def check_engines(engines: Any, plan: PrecisionPlan, backend: str, version: WeightVersion | None) -> None:
    """Asks every engine over HTTP. SyncError naming the first thing that is not as the plan says."""
    import ray
    import requests

    for url in ray.get([engine.get_url.remote() for engine in engines]):
        answer = requests.get(f"{url}/server_info", timeout=60)
        answer.raise_for_status()
        proof.check(proof.states(answer.json()), plan, backend, version)
