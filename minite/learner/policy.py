"""The policy under training: model, gradients, optimizer; and the ways in and out: export, Hugging Face, checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from minite.backends.base import Backend
from minite.backends.registry import get_backend
from minite.config import PrecisionPlan, RunConfig
from minite.learner import checkpoint, hf, optimizer, precision, shards
from minite.learner.model import PolicyModel, policy_config
from minite.models import get_model
from minite.sync.clock import Clock
from minite.sync.export import pack, unquantized
from minite.sync.transport import Bucket, package
from minite.types import WeightVersion


class Policy:
    """All state of one learner rank. Methods are collective."""

    def __init__(self, run_config: RunConfig, plan: PrecisionPlan, device: torch.device) -> None:
        self.config, self.plan, self.device = run_config, plan, device
        self.step = 0  # optimizer steps on rollouts
        self.export_seconds: dict[str, float] = {}  # of the last export: gather, pack, stage (to the host, digests)
        self.reference: dict[str, Tensor] | None = None  # this rank's part of the KL reference, on the CPU
        family = get_model(run_config.model.kind)
        self._ops, self._shapes = family.megatron_ops(run_config.model), family.hf_tensors(run_config.model)
        self.backend = get_backend(plan.backend, device=device, strict=plan.alignment == "strict")
        self.model = PolicyModel(policy_config(run_config, plan, device), run_config)
        self.model.to(device)  # megatron makes the router on the CPU
        precision.bind(self.model, plan, self.backend, parallel_state.get_tensor_model_parallel_group())
        self.ddp, self.optimizer = optimizer.build(self.model, run_config.learner)
        if run_config.model.checkpoint is not None:
            self.load_hf(run_config.model.checkpoint)
        else:
            std, seed = run_config.model.init_std, run_config.seed
            self._start_from(lambda name, shape: hf.initial_tensor(name, shape, std, seed))

    def use_backend(self, backend: Backend) -> None:
        """Compute with another backend from here on, such as one that records what passes through it."""
        self.backend = backend
        precision.bind(self.model, self.plan, backend, parallel_state.get_tensor_model_parallel_group())

    def use_plan(self, plan: PrecisionPlan) -> None:
        """Obey another plan of the same model; the quantized weights of the old one are forgotten."""
        self.plan = plan
        self.use_backend(self.backend)

    def load_hf(self, path: str | Path) -> None:
        """Start from a Hugging Face directory with a fresh optimizer; it becomes the KL reference if there is a KL."""
        self._start_from(hf.reader(path, self.config))

    def _start_from(self, read: hf.Read) -> None:
        parameters = dict(self.model.named_parameters())
        for op in self._ops:
            full = op.join(tuple(read(name, self._shapes[name]) for name in op.hf))
            shards.set_parameter(parameters, op.megatron, full)
        self.weights_loaded()
        optimizer.reset(self.optimizer)
        self.step = 0
        if self.config.algo.kl_coef > 0:
            self.reference = {name: p.detach().cpu().clone() for name, p in parameters.items()}

    def weights_loaded(self) -> None:
        """Working weights were written: refresh the FP32 master weights and forget quantized ones."""
        self.optimizer.reload_model_params()
        self.model.weights_changed()

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """The model with the weights of the KL reference, for the time of a ``with`` block without gradients."""
        if self.reference is None:
            raise RuntimeError("no reference policy: algo.kl_coef is 0")
        current = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._write(self.reference)
        try:
            yield
        finally:
            self._write(current)

    def _write(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.data.copy_(weights[name])
        self.model.weights_changed()

    def export(self) -> tuple[list[Bucket], WeightVersion] | None:
        """Weights as samplers take them, on rank 0; None on the others, which only take part in the gathers."""
        full, clock = shards.full_parameters(self.model), Clock(self.device)
        if dist.get_rank() != 0:
            _drain(full)
            return None
        named = (pair for name, tensor in clock.during("gather", full) for pair in self._ops.to_hf(name, tensor))
        digest = None
        if self.config.sampler.transport == "packed":
            groups = pack(self.plan, named, self.backend, shapes=self._shapes)
        else:
            groups, digest = unquantized(self.plan, named, self.backend, shapes=self._shapes)
        with clock.timed("stage"):
            exported = package(clock.during("pack", groups), self.step, self.plan.digest, quantized=digest)
        self.export_seconds = clock.seconds
        return exported

    def save_hf(self, path: str | Path) -> None:
        """Write the working weights as a Hugging Face directory (rank 0 writes)."""
        full = shards.full_parameters(self.model)
        if dist.get_rank() == 0:
            hf.write(path, full, self._ops, self.config)
        else:
            _drain(full)
        dist.barrier()

    def save(self, directory: str | Path) -> None:
        checkpoint.save(self, Path(directory))

    def load(self, directory: str | Path) -> None:
        checkpoint.load(self, Path(directory))


def _drain(parameters: Iterator[tuple[str, Tensor]]) -> None:
    """Take part in the gathers of a rank that uses the results."""
    for _ in parameters:
        pass
