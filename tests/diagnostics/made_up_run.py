"""A run directory as the driver writes it, with curves of believable shape."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

PHASES = {"time/logprob": 0.5, "time/rollout": 1.3, "time/sync": 0.3, "time/train": 1.1}


def record(step: int, steps: int, rng: random.Random) -> dict[str, object]:
    done = step / max(steps, 1)
    gap = 0.045 + 0.03 * done + rng.gauss(0, 0.003)
    tail = max(0.0, 0.01 + 0.03 * done**3 + rng.gauss(0, 0.002))
    values: dict[str, object] = {
        "step": step,
        "reward/mean": 1 / (1 + math.exp(3 - 6 * done)) + rng.gauss(0, 0.03),
        "entropy/mean": 1.2 - 0.7 * done + rng.gauss(0, 0.02),
        "response/length_mean": 12 + 6 * done + rng.gauss(0, 0.5),
        "loss/policy": rng.gauss(0, 0.01),
        "loss/clip_frac": abs(rng.gauss(0.004, 0.002)),
        "learner/grad_norm": abs(rng.gauss(0.6, 0.15)),
        "gap/abs_mean": gap,
        "gap/abs_max": 30 * gap,
        "gap/p99": 6 * gap + rng.gauss(0, 0.02),
        "gap/p1": -7 * gap - 0.3 * done**4 + rng.gauss(0, 0.02),
        "gap/corr_advantage": rng.gauss(0.02, 0.01),
        "ratio/ess": 1 - 1.5 * gap + rng.gauss(0, 0.005),
        "triage/clear_frac": 1 - 0.12 - tail,
        "triage/narrowing_frac": 0.06 + rng.gauss(0, 0.003),
        "triage/widening_frac": 0.06 + rng.gauss(0, 0.003),
        "triage/tail_frac": tail,
        "triage/broken_frac": 0.0,
        "triage/narrowing_grad_share": 0.09,
        "triage/widening_grad_share": 0.04 + rng.gauss(0, 0.002),
        **{f"triage/tail_frac_q{q}": tail * (0.4 + 0.3 * q) for q in (1, 2, 3, 4)},
        "correction/dropped_frac": tail,
        "correction/broken_frac": 0.0,
        **{phase: seconds * (1 + abs(rng.gauss(0, 0.1))) for phase, seconds in PHASES.items()},
    }
    values["time/step"] = sum(float(values[phase]) for phase in PHASES)  # type: ignore[arg-type]
    if step % 10 == 0:
        values["accuracy/heldout"] = min(1.0, 0.3 + 0.5 * done)
    return dict(sorted(values.items()))


def write_run(run_dir: Path, steps: int, *, settings: bool = True) -> Path:
    """metrics.jsonl of ``steps`` steps, and config.json and plan.json where asked."""
    rng = random.Random(0)
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record(step, steps, rng)) for step in range(1, steps + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if settings:
        config = {
            "name": "tiny_qwen3_moe_w4a4_grpo",
            "seed": 0,
            "model": {"kind": "qwen3_moe", "num_layers": 4, "hidden_size": 128, "vocab_size": 64},
            "algo": {"prompts_per_step": 32, "group_size": 8, "minibatches": 1},
            "correction": {"kind": "triage"},
            "learner": {"lr": 1e-3},
            "sampler": {"kind": "embedded"},
            "driver": {"steps": steps, "placement": "colocated"},
        }
        module = {"format": "w4a4", "weight": "nvfp4_1d", "input": "nvfp4_row"}
        head = {"format": "bf16", "weight": "bf16", "input": "bf16"}
        plan = {"alignment": "aligned", "kv_cache": "bf16", "backend": "auto", "digest": "ab12" * 16}
        (run_dir / "config.json").write_text(json.dumps(config))
        (run_dir / "plan.json").write_text(json.dumps({**plan, "modules": [module] * 96 + [head]}))
    return run_dir
