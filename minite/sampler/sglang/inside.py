"""What one SGLang scheduler process holds and can prove: its plan, its weights, its backend. At most one per process.

It never raises into SGLang for a bad update, which would take the whole engine down: the fault is kept, told in the
next proof, and the engine then refuses to generate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minite.backends.registry import get_backend
from minite.config.plan import PrecisionPlan
from minite.config.schema import ModelConfig
from minite.errors import UserError
from minite.sampler.embedded.weights import Linear
from minite.sampler.sglang.names import operands
from minite.sampler.sglang.ranks import Ranks
from minite.sampler.sglang.shards import ShardedWeights
from minite.sampler.sglang.watching import Watch
from minite.sampler.sglang.wire import DISK, VERSION, WATCH
from minite.sync import disk
from minite.sync.clock import Clock
from minite.sync.errors import SyncError
from minite.sync.export import Packer
from minite.sync.flat import unflatten
from minite.sync.transport import MANIFEST, UNQUANTIZED, from_wire, read_manifest
from minite.types import WeightVersion

_current: Inside | None = None


class Inside:
    """The state of one scheduler process."""

    def __init__(self, plan: PrecisionPlan, device: str, ranks: Ranks) -> None:
        self.plan, self.device, self.ranks = plan, torch.device(device), ranks
        self.backend: Any = get_backend(plan.backend, device=device, strict=False)
        self.weights = ShardedWeights(plan, ModelConfig(**plan.model), self.device, ranks)
        self.modules: dict[str, str] = {}  # SGLang's module -> "weight operand x input operand"
        self.version: WeightVersion | None = None  # of the update under way, then of the weights held
        self.digest: str | None = None  # of the bytes held, once an update is complete and verified
        self.fault: str | None = None
        self._packer = Packer(plan, self.backend)  # of what the update under way brings in the model's dtype
        self.updates = 0
        self.watch: Watch | None = None
        self.clock = Clock(self.device)  # of the last update

    def linear(self, module: str, names: Iterable[str]) -> Linear:
        """The GEMM of one of SGLang's modules, which fuses the linears ``names``."""
        return self._keep(module, self.weights.linear(*names))

    def expert_linear(self, module: str, experts: Iterable[tuple[str, ...]]) -> Linear:
        """The grouped GEMM of a layer's experts; each item names the fused linears of one expert."""
        return self._keep(module, self.weights.expert_linear(experts))

    def _keep(self, module: str, linear: Linear) -> Linear:
        self.modules[module] = operands(linear.weight_operand, linear.input_operand)
        return linear

    # -- weight updates -----------------------------------------------------------------------------------------------

    def receive(self, model: nn.Module, flat: Mapping[str, Tensor]) -> None:
        """Take one message of an update: the version that opens it, tensors, the manifest that ends it."""
        named = from_wire(unflatten(flat))
        if WATCH in named:
            self._watch(_word(named[WATCH]))
            return
        if DISK in named:
            self._read(_word(named[DISK]))
            return
        last, manifest = named.pop(MANIFEST, None), None
        with self._kept():
            if VERSION in named:
                self._begin(model, WeightVersion(**json.loads(_word(named.pop(VERSION)))))
            self._load(named, quantize=named.pop(UNQUANTIZED, None) is not None)
            manifest = None if last is None else read_manifest(last)
        if last is not None:
            self._finish(manifest)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """A mistake becomes the fault of this update, and nothing raises into SGLang."""
        try:
            yield
        except UserError as error:
            self.fault = self.fault or str(error)

    def _begin(self, model: nn.Module, version: WeightVersion) -> None:
        self.version, self.digest, self.fault, self.clock = version, None, None, Clock(self.device)
        self.weights.loaded.clear()
        self._packer = Packer(self.plan, self.backend)
        if version.plan_digest != self.plan.digest:
            raise SyncError(
                f"the weights of step {version.step} were made under plan {version.plan_digest}, "
                f"this scheduler runs {self.plan.digest}"
            )
        self._adopt(model)

    def _adopt(self, model: nn.Module) -> None:
        """Point at the parameters that SGLang holds itself: embedding, norms, router, LM head.

        Looked up anew for every update, since SGLang may have replaced one.
        """
        parameters = dict(model.named_parameters())
        held = {name for linear in self.weights.linears for name in linear.views}
        for name, stored in self.weights.stored.items():
            if name in held:
                continue
            parameter = parameters.get(name)
            if parameter is None or parameter.dtype != stored.dtype or parameter.shape[1:] != stored.shape[1:]:
                got = None if parameter is None else f"{parameter.dtype} {list(parameter.shape)}"
                raise SyncError(f"{name}: SGLang's model has {got}, expected {stored.dtype} {list(stored.shape)}")
            self.weights.adopt(name, parameter.data)

    def _load(self, named: Mapping[str, Tensor], quantize: bool = False) -> None:
        """Put tensors into their places, quantized first where they come in the model's dtype."""
        if self.fault is not None:
            return
        if self.version is None or self.digest is not None:
            raise SyncError("tensors arrived outside of a weight update")
        with self.clock.timed("load"):
            if not quantize:
                self.weights.load(named)
                return
            for name, tensor in named.items():
                self.weights.load(self._packer.add(name, tensor.clone()))  # the message ends before the group does

    def _read(self, directory: str) -> None:
        """All tensors of the update under way, and its end, from a directory of `minite convert`."""
        manifest = None
        with self._kept():
            try:
                manifest = disk.manifest(directory)
                for name, tensor in disk.sent_tensors(directory):
                    self._load({name: tensor})
            except OSError as error:
                raise SyncError(f"{directory}: cannot be read ({error})") from None
        self._finish(manifest)

    def _finish(self, manifest: Mapping[str, str] | None) -> None:
        """Verify and prepare, if every rank has come this far: both are collective, so no rank may be missing."""
        with self._kept():
            if self.fault is None:
                self.weights.check_complete()
        fault = next((fault for fault in self.ranks.everyones(self.fault) if fault is not None), None)
        self.fault = self.fault or fault
        if self.fault is not None:
            return
        with self._kept():
            assert self.version is not None
            with self.clock.timed("verify"):
                digest = self.weights.verify(self.version.weight_digest, manifest)
            with self.clock.timed("prepare"):
                self.prepare()
            self.digest = digest
            self.updates += 1

    def _watch(self, path: str) -> None:
        """Start to note every operation; with a path, write down what was noted and stop."""
        if self.watch is None:
            self.watch = Watch(self.backend, self.weights.linears)
            self.backend = self.watch.backend
        else:
            self.backend = self.watch.inner
            self.watch.end(path)
            self.watch = None

    def prepare(self) -> None:
        """Bring new weights into the form that GEMMs read, in the memory that CUDA graphs have recorded."""
        for linear in self.weights.linears:
            before = linear.prepared
            linear.prepare(self.backend)
            assert before is None or linear.prepared is before, f"{linear.entry.name} moved in a weight update"

    def proof(self) -> dict[str, Any]:
        """What the engine checks: JSON-ready, computed in this process from what it holds."""
        return {
            "pid": os.getpid(),
            "rank": [self.ranks.rank, self.ranks.size],
            "plan_digest": self.plan.digest,
            "backend": self.backend.name,
            "modules": self.modules,
            "step": None if self.version is None else self.version.step,
            "weight_digest": self.digest,
            "fault": self.fault,
            "updates": self.updates,
            "seconds": self.clock.seconds,
            "held_bytes": sum(b.nbytes for linear in self.weights.linears for b in linear.buffers.values()),
        }


def _word(tensor: Tensor) -> str:
    return bytes(tensor.cpu().numpy()).decode()


def start(plan_file: str, device: str, ranks: Ranks) -> Inside:
    """Become the state of this process. Raises UserError for a damaged plan."""
    global _current
    plan = PrecisionPlan.from_json(Path(plan_file).read_text(encoding="utf-8"), plan_file)
    _current = Inside(plan, device, ranks)
    return _current


def current() -> Inside | None:
    """The state of this process; None where SGLang runs without a miniTE plan."""
    return _current


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader. See Inside.receive."""
    assert _current is not None, "the quantization method of the plan was not built"
    _current.receive(model, dict(named_tensors))
