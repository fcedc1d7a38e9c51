"""The weights an engine holds: verbatim as they were sent, already side by side as its GEMMs read them.

Every sent tensor is a view into a buffer of its GEMM (q, k and v stacked along N; experts along E), so loading is one
copy, and what is digested is what is computed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from minite.backends.base import Backend, Operand
from minite.backends.refresh import refreshed
from minite.config.plan import PlanEntry, PrecisionPlan
from minite.config.schema import ModelConfig
from minite.sync.errors import SyncError
from minite.sync.hashing import dtype_name
from minite.sync.stored import MODEL_DTYPES, from_parts, stored_model, stored_parts
from minite.sync.verify import Digest, combine, first_difference


class Linear:
    """One GEMM: fused linears stacked along N, for one matrix [N, K] or for the experts of a layer [E, N, K]."""

    def __init__(self, experts: list[list[PlanEntry]], grouped: bool, dtype: torch.dtype, device: torch.device) -> None:
        """experts: the fused members of each expert, which the plan decides alike; ``grouped`` False: one matrix."""
        members = experts[0]
        self.entry, self.grouped = members[0], grouped
        self.weight_operand, self.input_operand = self.entry.weight, self.entry.input
        self.buffers: dict[str, Tensor] = {}  # suffix -> [E, sum of N, ..]; weight_amax [E, members]
        self.views: dict[str, Tensor] = {}  # sent name -> its place
        rows = sum(e.n for e in members)
        for suffix, stored in stored_parts(self.weight_operand, rows, members[0].k, dtype).items():
            shape = stored.shape or (len(members),)
            buffer = torch.zeros((len(experts), *shape), dtype=stored.dtype, device=device)
            self.buffers[suffix] = buffer
            for e, row in enumerate(experts):
                start = 0
                for m, entry in enumerate(row):
                    first, last = (stored.shape[0] * n // rows if stored.shape else 0 for n in (start, start + entry.n))
                    self.views[f"{entry.name}.{suffix}"] = buffer[e, first:last] if stored.shape else buffer[e, m]
                    start += entry.n
        self.prepared: object = None

    def prepare(self, backend: Backend) -> None:
        """Bring the loaded weights into the form the backend's GEMM reads fastest, in place if it was so before.

        Once per weight version.
        """
        self.prepared = refreshed(self.prepared, backend.prepare(self.operand(), decode=True))

    def operand(self) -> Operand:
        """The loaded weight, [N, K] or [E, N, K]."""
        parts = dict(self.buffers)
        if "weight_amax" in parts:
            amax_EM = parts["weight_amax"]
            if not torch.equal(amax_EM, amax_EM[:, :1].expand_as(amax_EM)):
                names = [name for name in self.views if name.endswith(".weight_amax")]
                raise SyncError(f"{names[0]}: differs from the amax of another member of its fusion group")
            parts["weight_amax"] = amax_EM[:, 0]
        if not self.grouped:
            parts = {suffix: part[0] for suffix, part in parts.items()}
        return from_parts(self.weight_operand, parts) if self.weight_operand != "bf16" else parts["weight"]


class Weights:
    """All tensors of one weight version, and the linears that use them."""

    def __init__(self, plan: PrecisionPlan, model: ModelConfig, device: torch.device) -> None:
        self.plan, self.model, self.device = plan, model, device
        self.dtype = MODEL_DTYPES[model.dtype]
        self.stored = stored_model(plan, model)
        self.views: dict[str, Tensor] = {}  # sent name -> its place
        self.linears: list[Linear] = []
        self.loaded: set[str] = set()

    def plain(self, name: str) -> Tensor:
        """A tensor that is used as it is (embedding, norms, router, LM head)."""
        if name not in self.views:
            stored = self.stored[name]
            self.views[name] = torch.zeros(stored.shape, dtype=stored.dtype, device=self.device)
        return self.views[name]

    def linear(self, *names: str) -> Linear:
        """One GEMM for linears that read one input; they are a fusion group if there are several."""
        return self._add([names], grouped=False)

    def expert_linear(self, experts: Iterable[tuple[str, ...]]) -> Linear:
        """One grouped GEMM for a layer's experts; each item names the fused linears of one expert."""
        return self._add(experts, grouped=True)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to their places. An unknown name, a wrong shape or dtype, or a second arrival is a SyncError."""
        for name, tensor in tensors.items():
            stored = self.stored.get(name)
            if stored is None:
                raise SyncError(f"{name}: not a tensor of this model and plan")
            if name in self.loaded:
                raise SyncError(f"{name}: arrived twice in one weight update")
            if (tuple(tensor.shape), tensor.dtype) != (stored.shape, stored.dtype):
                raise SyncError(
                    f"{name}: got {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                    f"expected {dtype_name(stored.dtype)} {list(stored.shape)}"
                )
            self.views[name].copy_(self.part(name, tensor))
            self.loaded.add(name)

    def verify(self, weight_digest: str, manifest: Mapping[str, str] | None) -> str:
        """Digest of the bytes held. A SyncError naming a tensor when it is not ``weight_digest``."""
        self.check_complete()
        digest = self.digest()
        held = digest.hexdigest()
        if held != weight_digest:
            trusted = manifest is not None and combine(manifest) == weight_digest
            blamed = first_difference(manifest, digest.parts) if manifest and trusted else "unknown tensor"
            raise SyncError(
                f"{blamed}: the weights held are not those announced (digest held {held}, announced {weight_digest}); "
                "nothing is sampled until an update succeeds"
            )
        return held

    def check_complete(self) -> None:
        """SyncError when a tensor of the update under way has not arrived."""
        missing = [name for name in self.stored if name not in self.loaded]
        if missing:
            raise SyncError(
                f"{missing[0]}: missing from the weight update ({len(missing)} of {len(self.stored)} missing)"
            )

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """What is held of a tensor that was sent: all of it."""
        return tensor

    def digest(self) -> Digest:
        """Digest of every tensor held."""
        digest = Digest()
        digest.update_many({name: self.views[name] for name in self.stored})
        return digest

    def _add(self, experts: Iterable[tuple[str, ...]], grouped: bool) -> Linear:
        linear = self._linear([[self.plan[name] for name in names] for names in experts], grouped)
        self.views |= linear.views
        self.linears.append(linear)
        return linear

    def _linear(self, entries: list[list[PlanEntry]], grouped: bool) -> Linear:
        return Linear(entries, grouped, self.dtype, self.device)
