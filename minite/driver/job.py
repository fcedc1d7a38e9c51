"""What a run needs that is known before it starts, and every mistake that can be seen by then."""

from __future__ import annotations

from pathlib import Path

from minite.backends.device import use_cuda
from minite.backends.registry import get_backend
from minite.config import PrecisionPlan, RunConfig
from minite.config.plan_checks import check_backend_shapes
from minite.config.plan_switch import with_bf16_inputs
from minite.driver.cluster import find_slot
from minite.driver.data import load_task
from minite.driver.exporters import check_exporters
from minite.driver.progress import ProgressView
from minite.driver.recovery import Recovery
from minite.driver.reward import Scorer
from minite.driver.tokenizer import make_tokenizer
from minite.errors import UserError
from minite.models import get_model
from minite.sampler import check_engine


class Job:
    """What a run needs that is known before it starts. Raises UserError for everything that can be seen by then."""

    def __init__(self, config: RunConfig, plan: PrecisionPlan, run_dir: Path) -> None:
        self.config, self.plan, self.run_dir = config, plan, run_dir
        self.slot = find_slot(config)
        self.tokenizer = make_tokenizer(config)
        self.task = load_task(config, self.tokenizer)
        check_engine(config)
        check_exporters(config)
        with_bf16_inputs(config, plan, config.monitor.switch)  # its patterns fit, also if no drift ever comes
        self.backend = _one_backend(config, plan)
        self.scorer = Scorer(config.data)
        self.view = ProgressView(config.name, config.driver.steps)
        self.recovery = Recovery(config.driver.retries, self.view.note)
        if len(self.task.heldout) > len(self.task.train):
            self.view.note(
                f"data.heldout: {len(self.task.heldout)} questions are held out, only {len(self.task.train)} trained on"
            )

    def close(self) -> None:
        """End the reward function's process and the live table."""
        self.view.close()
        self.scorer.close()


def _one_backend(config: RunConfig, plan: PrecisionPlan) -> str:
    """What learner and sampler compute with, in words.

    UserError for a shape that a backend cannot take, and for two backends where their numbers must agree.
    """
    words = []
    for role, device in (("learner", config.learner.device), ("sampler", config.sampler.device)):
        where = "cuda" if use_cuda(device) else "cpu"
        backend = get_backend(plan.backend, device=where, strict=plan.alignment == "strict")
        check_backend_shapes(config, plan, get_model(config.model.kind), backend.name)
        words.append(f"{backend.name} ({backend.kind}) on {where}")
        if words[0] != words[-1] and plan.alignment != "off":
            raise UserError(
                f"precision.alignment is {plan.alignment}, but the learner would compute with {words[0]} and the "
                f"{role} with {words[-1]}: give both one device, or set alignment: off"
            )
    return words[0] if words[0] == words[1] else f"{words[0]} in the learner, {words[1]} in the sampler"
