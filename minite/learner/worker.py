"""One rank of the learner: batches in, log-probs, metrics and weights out. A plain class; the driver's actor wraps it.

Every method is collective: all ranks call it with the same arguments. Each rank takes its share of the responses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from minite.backends.device import use_cuda
from minite.backends.recording import Note, RecordingGemms
from minite.config import PrecisionPlan, RunConfig
from minite.layers.recording import recorded
from minite.learner import cpu_compat
from minite.learner.packing import Microbatch, pack, plan_microbatches
from minite.learner.schedule import learning_rate
from minite.losses.grpo import grpo_loss, mean_metrics
from minite.types import RolloutBatch, WeightVersion

if TYPE_CHECKING:
    from minite.sync.transport import Bucket


class LearnerWorker:
    """Megatron learner rank ``rank`` of ``world_size``; ranks meet at master_addr:master_port.

    Raises UserError for a layout, plan or checkpoint that does not fit the recipe.
    """

    def __init__(
        self,
        run_config: RunConfig,
        plan: PrecisionPlan,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
    ) -> None:
        self.config = run_config
        self.device = _device(run_config, rank)
        cpu_compat.install(self.device.type)
        cpu_compat.mute()
        # Megatron enters the process here, now that it is fit for the device.
        from minite.learner import optimizer, parallel
        from minite.learner.policy import Policy

        self._optim, self._parallel = optimizer, parallel
        parallel.start(run_config, rank, world_size, master_addr, master_port, self.device)
        try:
            self._policy = Policy(run_config, plan, self.device)
        except BaseException:
            parallel.stop()
            raise
        self._data = parallel.data_ranks()
        self._flips: Tensor | None = None  # of the last log-probs, when the monitor is on
        self._unsound: list[str] = []

    @property
    def step(self) -> int:
        """Optimizer steps done on rollouts; steps of the warm start do not count."""
        return self._policy.step

    def sft_step(self, batch: RolloutBatch) -> dict[str, float]:
        """One supervised step on the loss-mask tokens: mean negative log-prob. Rate: warm_start.lr, constant."""
        tokens = int(batch.loss_mask_T.sum())
        total = 0.0
        self._optim.zero_grad(self._policy.ddp, self._policy.optimizer)
        self._policy.model.train()
        for micro in self._microbatches(batch, replay=False):
            logprob_T, _ = self._policy.model.token_logprobs(micro, temperature=1.0, entropy=False)
            loss = -logprob_T[micro.take(batch.loss_mask_T)].sum() / max(tokens, 1)
            loss.backward()
            total += float(loss.detach())
        metrics = {"loss/sft": self._sum({"loss": total})["loss"]}
        return metrics | self._update(self.config.warm_start.lr)

    @torch.no_grad()
    def logprobs(self, batch: RolloutBatch, which: str = "policy") -> tuple[Tensor, Tensor]:
        """(logprob_T float64, entropy_T float32) of every token at the sampler's temperature, same on all ranks. [nats]

        ``which``: "policy" (now) or "ref" (the KL reference; kept only when algo.kl_coef > 0).
        """
        values_2T = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
        model = self._policy.model
        model.eval()
        count = bool(self.config.monitor.watch) and which == "policy"
        with (
            self._policy.reference_weights() if which == "ref" else nullcontext(),
            model.counted_flips() if count else nullcontext() as self._flips,
        ):
            for micro in self._microbatches(batch, replay=self.config.algo.router_replay):
                logprob_T, entropy_T = model.token_logprobs(micro, self._temperature, entropy=True)
                assert entropy_T is not None
                n = len(micro.source_n)
                values_2T[:, micro.source_n] = torch.stack([logprob_T[:n].double(), entropy_T[:n].double()]).cpu()
        shared = values_2T.to(self.device)
        dist.all_reduce(shared, group=self._data.group)  # each token has one owner; the others add 0
        return shared[0].cpu(), shared[1].float().cpu()

    def router_flips(self) -> dict[str, float]:
        """Of the last ``logprobs``: share of (token, MoE layer) pairs whose own experts are not the sampler's.

        Empty for dense models and where nothing was replayed. Measured only with ``monitor.watch``.
        """
        if self._flips is None:
            return {}
        total = self._flips.clone()
        dist.all_reduce(total)  # every rank has tokens of its own, also those of one tensor-parallel group
        flipped, seen = total.tolist()
        return {"router/flip_frac": flipped / seen} if seen else {}

    def train_step(self, batch: RolloutBatch, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """One optimizer step on a batch with old_logprob_T and advantage_S. ``denominator``: its global loss tokens.

        ``lr_scale`` multiplies the scheduled learning rate.
        """
        if batch.old_logprob_T is None:
            raise ValueError("train_step needs batch.old_logprob_T")
        algo, old = self.config.algo, batch.old_logprob_T
        reference_T = self.logprobs(batch, "ref")[0] if algo.kl_coef > 0 else None
        advantage_T = batch.advantage_S[batch.sequence_T]
        sums: dict[str, float] = {}
        self._optim.zero_grad(self._policy.ddp, self._policy.optimizer)
        self._policy.model.train()
        for micro in self._microbatches(batch, replay=algo.router_replay):
            logprob_T, entropy_T = self._policy.model.token_logprobs(micro, self._temperature, algo.entropy_coef != 0)
            output = grpo_loss(
                logprob_T,
                micro.take(old),
                micro.take(advantage_T),
                micro.take(batch.loss_mask_T),
                None if batch.weight_T is None else micro.take(batch.weight_T),
                denominator,
                algo,
                None if reference_T is None else micro.take(reference_T),
                entropy_T,
            )
            output.loss.backward()
            sums = {key: sums.get(key, 0.0) + value for key, value in output.metrics.items()}
        lr = learning_rate(self.config.learner, self.step, self.config.driver.steps * algo.minibatches)
        metrics = mean_metrics(self._sum(sums)) | self._update(lr * lr_scale)
        self._policy.step += 1
        return metrics

    def unsound_gradients(self) -> list[str]:
        """Parameters for whose gradient, NaN or Inf or beyond all measure, the last skipped step was skipped."""
        return self._unsound

    def export(self) -> tuple[list[Bucket], WeightVersion] | None:
        """(buckets of named CPU tensors, their version) on rank 0, None elsewhere."""
        return self._policy.export()

    @property
    def export_seconds(self) -> dict[str, float]:
        """Of the last export, by phase; rank 0 only."""
        return self._policy.export_seconds

    def use_plan(self, plan: PrecisionPlan) -> None:
        """Compute under another plan of the same model from here on; weights and optimizer stay."""
        self._policy.use_plan(plan)

    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, step and generator into an empty directory."""
        self._policy.save(directory)

    def load(self, directory: str | Path) -> None:
        """Go on from what ``save`` wrote."""
        self._policy.load(directory)

    def load_hf(self, path: str | Path) -> None:
        """Start from a Hugging Face directory: fresh optimizer, step 0, and the KL reference."""
        self._policy.load_hf(path)

    def save_hf(self, path: str | Path) -> None:
        """Write the weights as a Hugging Face directory."""
        self._policy.save_hf(path)

    @contextmanager
    def watched(self, note: Note) -> Iterator[None]:
        """Within the block ``note`` is handed every GEMM and shared operation of a forward pass, in their order."""
        inner = self._policy.backend
        self._policy.use_backend(RecordingGemms(inner, note))
        try:
            with recorded(note):
                yield
        finally:
            self._policy.use_backend(inner)

    def close(self) -> None:
        """Leave the process group and let go of the model; no other method works after it."""
        self._parallel.stop()
        del self._policy, self._data
        # Megatron's modules hold the groups in cycles, and a group keeps threads and sockets for as long as it is held.
        gc.collect()

    @property
    def _temperature(self) -> float:
        return self.config.sampler.temperature

    def _microbatches(self, batch: RolloutBatch, replay: bool) -> Iterator[Microbatch]:
        layout = self.config.learner
        plan = plan_microbatches(batch.cu_seqlens_S1.diff().tolist(), layout.tokens_per_microbatch, self._data.size)
        for shares in plan:
            yield pack(batch, shares[self._data.rank], layout.tensor_parallel, replay, self.device)

    def _update(self, lr: float) -> dict[str, float]:
        policy = self._policy
        norm = self._optim.update(policy.ddp, policy.optimizer, lr, self.config.learner.weight_decay)
        if norm is None:
            self._unsound = self._optim.unsound(policy.ddp)
        metrics = {"learner/lr": lr, "learner/skipped_steps": float(norm is None)}
        return metrics if norm is None else metrics | {"learner/grad_norm": norm}  # a skipped step has none

    def _sum(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics of all data-parallel ranks together."""
        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values, group=self._data.group)
        return dict(zip(sums, values.tolist(), strict=True))


def _device(run_config: RunConfig, rank: int) -> torch.device:
    """The device of this rank. With one visible GPU per process (Ray) that is GPU 0."""
    if not use_cuda(run_config, "learner"):
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
