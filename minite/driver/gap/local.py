"""Learner and sampler in this process, without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from minite.config import PrecisionPlan, RunConfig
from minite.learner.worker import LearnerWorker
from minite.ports import LOOPBACK, free_port
from minite.sampler import make_engine
from minite.sampler.engine import Engine, update_weights
from minite.sync.transport import Bucket
from minite.types import RolloutBatch, WeightVersion


class LocalLearner:
    """What the warm start asks of a learner (actors.LearnerGroup), with one rank and in this process."""

    def __init__(self) -> None:
        self._worker: LearnerWorker | None = None

    def setup(self, config: RunConfig, plan: PrecisionPlan) -> None:
        self.close()
        self._worker = start_learner(config, plan)

    def sft_step(self, batch: RolloutBatch) -> dict[str, float]:
        assert self._worker is not None
        return self._worker.sft_step(batch)

    def save_hf(self, path: Path) -> None:
        assert self._worker is not None
        self._worker.save_hf(path)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


@dataclass(frozen=True)
class Pair:
    """A learner and a sampler of one plan."""

    worker: LearnerWorker
    engine: Engine

    def sync(self) -> None:
        """The learner's weights into the sampler, verified there."""
        exported = self.worker.export()
        assert exported is not None
        self.load(*exported)

    def load(self, buckets: Sequence[Bucket], version: WeightVersion) -> None:
        """Weights from anywhere into the sampler, verified there."""
        update_weights(self.engine, buckets, version)


def start_learner(config: RunConfig, plan: PrecisionPlan) -> LearnerWorker:
    return LearnerWorker(config, plan, 0, 1, LOOPBACK, free_port())


@contextmanager
def pair(config: RunConfig, plan: PrecisionPlan) -> Iterator[Pair]:
    """Both engines for the time of a ``with`` block; their weights are the learner's start, not yet in the sampler."""
    with closing(start_learner(config, plan)) as worker, closing(make_engine(config, plan)) as engine:
        yield Pair(worker, engine)
