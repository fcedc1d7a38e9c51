"""What a run needs that is known before it starts, and every mistake that can be seen by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from minite.backends.device import use_cuda
from minite.backends.registry import explain, get_backend
from minite.config import PrecisionPlan, RunConfig
from minite.config.plan_checks import check_backend_shapes
from minite.config.plan_switch import with_bf16_inputs
from minite.driver.cluster import find_slot, store_bytes
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
        self.backend, self.refused = _one_backend(config, plan)
        self.scorer = Scorer(config.data)
        self.view = ProgressView(config.name, config.driver.steps)
        self.recovery = Recovery(config.driver.retries, self.view.note)
        slow_store = None if ray.is_initialized() else store_bytes(config, plan)[1]  # a caller's Ray has its own
        if slow_store is not None:
            self.view.note(slow_store)
        if len(self.task.heldout) > len(self.task.train):
            self.view.note(
                f"data.heldout: {len(self.task.heldout)} questions are held out, only {len(self.task.train)} trained on"
            )

    def check_backend(self, folder: Path, state: dict[str, Any]) -> None:
        """Whether a checkpoint, by its ``state``, was computed as it will be here: a note, or in strict a UserError.

        A plan says auto where the recipe does, so its digest is the same on another machine. Codes and scales are
        equal in all backends; sums are not, and only strict promises them. Old checkpoints do not say.
        """
        before = state.get("backend", self.backend)
        if _numbers(before) == _numbers(self.backend):
            return
        if self.plan.alignment == "strict":
            raise UserError(
                f"{folder} was computed with {before}, here it would go on with {self.backend}: alignment strict "
                "promises the same bits; resume where the run began"
            )
        self.view.note(
            f"{folder.name} was computed with {before}, the run goes on with {self.backend}: the same codes and "
            "scales, sums in another order"
        )

    def close(self) -> None:
        """End the reward function's process and the live table."""
        self.view.close()
        self.scorer.close()


def _numbers(backend: str) -> str:
    """Equal for backends that compute equal numbers: cpu is the reference compiled, strict too."""
    return backend.replace("cpu (", "reference (")


def _one_backend(config: RunConfig, plan: PrecisionPlan) -> tuple[str, list[str]]:
    """What learner and sampler compute with, in words; and why not with the better backends, where auto chose.

    UserError for a shape that a backend cannot take, and for two backends where their numbers must agree.
    """
    words, refused, strict = [], dict[str, None](), plan.alignment == "strict"
    for role in ("learner", "sampler"):
        where = "cuda" if use_cuda(config, role) else "cpu"
        backend = get_backend(plan.backend, device=where, strict=strict)
        check_backend_shapes(config, plan, get_model(config.model.kind), backend.name)
        words.append(f"{backend.name} ({backend.kind}) on {where}")
        if plan.backend == "auto":  # the first without a refusal
            for verdict in explain(device=where, strict=strict):
                if verdict.refusal is None:
                    break
                refused[f"not {verdict.name}: {verdict.refusal}"] = None
        if words[0] != words[-1] and plan.alignment != "off":
            raise UserError(
                f"precision.alignment is {plan.alignment}, but the learner would compute with {words[0]} and the "
                f"{role} with {words[-1]}: give both one device, or set alignment: off"
            )
    chosen = words[0] if words[0] == words[1] else f"{words[0]} in the learner, {words[1]} in the sampler"
    return chosen, list(refused)
