"""What a rank does in test_parallel.py. Apart from the test module, so that spawned processes can import it."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minite.config import RunConfig
from minite.errors import DiskError
from minite.sync.transport import Bucket
from minite.types import RolloutBatch, WeightVersion
from tests.learner.tiny_policy import learner, optimizer_bits


@dataclass
class Outcome:
    """Of one rank; everything on the CPU."""

    logprob_T: Tensor
    entropy_T: Tensor
    exported: tuple[list[Bucket], WeightVersion] | None
    codes: dict[str, Tensor]  # the learner's own weight codes of layer 0, this rank's part
    metrics: list[dict[str, float]]  # of three steps
    after_T: Tensor  # log-probs after them


def train(rank: int, world: int, port: int, config: RunConfig, data: RolloutBatch, start: Path | None) -> Outcome:
    """Score, export, three policy steps, score."""
    with learner(config, rank, world, port) as worker:
        if start is not None:
            worker.load_hf(start)
        logprob_T, entropy_T = worker.logprobs(data)
        exported, codes = worker.export(), _codes(worker._policy.model.decoder.layers[0])
        metrics = [worker.train_step(data, int(data.loss_mask_T.sum())) for _ in range(3)]
        return Outcome(logprob_T, entropy_T, exported, codes, metrics, worker.logprobs(data)[0])


def _codes(layer) -> dict[str, Tensor]:
    experts = getattr(layer.mlp, "experts", layer.mlp)
    modules = {
        "qkv": layer.self_attention.linear_qkv,
        "proj": layer.self_attention.linear_proj,
        "fc1": experts.linear_fc1,
        "fc2": experts.linear_fc2,
    }
    return {name: module.matmul.cache._entry.quantized.codes for name, module in modules.items()}


def resume(rank: int, world: int, port: int, config: RunConfig, data: RolloutBatch, directory: Path) -> tuple:
    """Metrics and weights of a step after a checkpoint, uninterrupted and resumed by fresh learners."""
    with learner(config, rank, world, port) as worker:
        worker.train_step(data, 50)
        worker.save(directory)
        uninterrupted = worker.train_step(data, 50), worker.export()
        worker.load(directory)  # into a learner that is ahead
        rewound = worker.train_step(data, 50), worker.export()
    return uninterrupted, rewound


def go_on(
    rank: int,
    world: int,
    port: int,
    config: RunConfig,
    data: RolloutBatch,
    source: Path | None,
    target: Path,
    steps: int,
) -> tuple[WeightVersion | None, list[dict[str, float]]]:
    """From a checkpoint, if there is one: the version of the weights read, and the metrics of so many steps, with a
    checkpoint after the first."""
    with learner(config, rank, world, port) as worker:
        if source is not None:
            worker.load(source)
        exported = worker.export()
        metrics = [worker.train_step(data, 50)]
        worker.save(target)
        metrics += [worker.train_step(data, 50) for _ in range(steps - 1)]
        return exported and exported[1], metrics


def broken_gradient(
    rank: int, world: int, port: int, config: RunConfig, data: RolloutBatch
) -> tuple[list[float], list[bool], list[str]]:
    """Three steps, in the second of which the last rank's gradient begins as NaN: skipped steps, whether each left this
    rank's master weights and moments as they were, and the parameters named."""
    with learner(config, rank, world, port) as worker:
        policy = worker._policy
        plain, skipped, same = policy.model.token_logprobs, [], []

        def broken(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            logprob_T, entropy_T = plain(*args, **kwargs)
            logprob_T.register_hook(lambda grad: grad * float("nan"))
            return logprob_T, entropy_T

        for step in range(3):
            policy.model.token_logprobs = broken if step == 1 and rank == world - 1 else plain
            before = optimizer_bits(policy)
            skipped.append(worker.train_step(data, 50)["learner/skipped_steps"])
            same.append(all(torch.equal(a, b) for a, b in zip(before, optimizer_bits(policy), strict=True)))
        return skipped, same, worker.unsound_gradients()


def save_on_a_full_disk(
    rank: int, world: int, port: int, config: RunConfig, data: RolloutBatch, directory: Path, full: int, room: int
) -> str:
    """What a save says while rank ``full`` has no room for a file of more than ``room`` bytes; then a step, a save
    with room, and a load."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with learner(config, rank, world, port) as worker:
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            worker.save(directory / "no_room")
            said = ""
        except DiskError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        worker.train_step(data, 50)
        worker.save(directory / "room")
        worker.load(directory / "room")
    return said


def write_start(rank: int, world: int, port: int, config: RunConfig, directory: Path) -> None:
    with learner(config, rank, world, port) as worker:
        worker.save_hf(directory)
