"""NaN, Inf and nothing at all, wherever a step may meet them: what follows is what the recipe says, it is counted and
named, and the optimizer keeps every bit of a step that is skipped. NVFP4 gradients, which quantize dy too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from minite.driver.loop import Run
from minite.driver.reward import BadReward
from minite.errors import UserError
from tests.driver.in_process import Learners, begin
from tests.driver.metric_keys import undocumented
from tests.driver.tiny_run import config
from tests.learner.tiny_policy import optimizer_bits

NAN, INF = float("nan"), float("inf")
SETTINGS = (
    "precision.formats.w4a4.dgrad=nvfp4", "precision.formats.w4a4.wgrad=nvfp4", "warm_start.steps=0",
    "algo.minibatches=1", "data.heldout=1", "driver.steps=9", "driver.eval_every=9", "driver.checkpoint_every=9",
)  # fmt: skip


def parameter(run: Run, end: str) -> torch.Tensor:
    return next(p for name, p in run.learners.policy.model.named_parameters() if name.endswith(end))


def gradient(value: float) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            grad.view(-1)[3] = value
            return grad

        parameter(run, "experts.linear_fc1.weight").register_hook(hook)

    return spoil


def logit(value: float, training: bool) -> Callable[[Run], None]:
    """Of three tokens of the first response, while it is trained on or while it is scored."""

    def spoil(run: Run) -> None:
        def hook(module: torch.nn.Module, _: Any, output: Any) -> Any:
            if module.training != training:
                return output
            logits = output[0].clone()
            logits[3:6, ..., 0] = value
            return (logits, *output[1:])

        run.learners.policy.model.output_layer.register_forward_hook(hook)

    return spoil


def norm(run: Run) -> None:
    parameter(run, "0.input_layernorm.weight").data.view(-1)[5] = INF


def weight(run: Run) -> None:
    parameter(run, "0.self_attention.linear_proj.weight").data[0, 0] = NAN


def sampled(change: Callable[[list[Any]], None]) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        run.samplers.spoil = change

    return spoil


def cut_to_nothing(completion: Any) -> None:
    completion.tokens, completion.logprobs = [], []
    completion.routed_experts = completion.routed_experts[: len(completion.prompt_tokens) - 1]


def two_experts(completions: list[Any]) -> None:
    for c in completions:
        c.routed_experts = torch.tensor([0, 1], dtype=torch.int16).expand_as(c.routed_experts).clone()


def rewards(of: Callable[[int, int], float]) -> Callable[[Run], None]:
    """By number of the prompt, counted as they come, and of its response."""

    def spoil(run: Run) -> None:
        calls = iter(range(10_000))
        run.rollouts._score = lambda *_: of(*divmod(next(calls), 4))

    return spoil


def bad_reward(prompt: int, sample: int) -> float:
    if (prompt, sample) == (0, 0):
        raise BadReward("it returned nan")
    return float(sample % 2)


def never_stop(run: Run) -> None:
    params = run.rollouts._sampling()
    run.rollouts._sampling = lambda: replace(params, stop_token_ids=())


@dataclass
class Fault:
    where: str
    spoil: Callable[[Run], None]
    says: dict[str, Any] = field(default_factory=dict)  # metrics of the step
    skipped: bool = False
    named: str = ""  # in what the run says
    stops: bool = False
    settings: tuple[str, ...] = ()


SKIP = {"skipped": True, "says": {"learner/skipped_steps": 1.0}}
STEP_OF = "step 1: the gradient of "
FAULTS = [
    Fault("gradient nan", gradient(NAN), named=STEP_OF + "decoder.layers.0.mlp.experts.linear_fc1.weight is", **SKIP),
    Fault("gradient inf", gradient(-INF), named="skipped, as learner.bad_gradient says", **SKIP),
    Fault("gradient whose norm overflows", gradient(1e25), named=STEP_OF, **SKIP),
    Fault(
        "gradient nan, stop", gradient(NAN), named="stopped as learner.bad_gradient", stops=True, skipped=True,
        settings=("learner.bad_gradient=stop",),
    ),
    Fault("logit nan in training", logit(NAN, True), named=STEP_OF, **SKIP),
    Fault("logit inf in training", logit(INF, True), named=STEP_OF, **SKIP),
    Fault("logit nan in scoring", logit(NAN, False), {"gap/nonfinite": 3.0, "learner/skipped_steps": 0.0}),
    Fault(
        "logit nan in scoring, skip", logit(NAN, False), {"correction/unhealthy": 1.0}, skipped=True,
        named="skipped, as correction.unhealthy says",
        settings=("correction.unhealthy=skip", "correction.max_dropped_frac=0.01"),
    ),
    Fault("scale of an activation", norm, stops=True, skipped=True, named="input of model.layers.0.self_attn.qkv_proj"),
    Fault("scale of a weight", weight, stops=True, skipped=True, named="weight of model.layers.0.self_attn.o_proj"),
    Fault(
        "sampler's log-prob", sampled(lambda done: done[0].logprobs.__setitem__(0, NAN)), {"gap/nonfinite": 1.0},
    ),
    Fault("reward nan", rewards(bad_reward), {"reward/failed_groups": 1.0}, named="it returned nan; its group is left"),
    Fault(
        "reward nan, stop", rewards(bad_reward), stops=True, skipped=True, named="stopped as data.bad_reward says",
        settings=("data.bad_reward=stop",),
    ),
    Fault("experts without a token", sampled(two_experts)),
    Fault(
        "one flat group", rewards(lambda prompt, sample: float(sample % 2 and prompt != 1)),
        {"rollout/groups": 5.0, "rollout/flat_frac": 0.2, "rollout/filled_frac": 0.0},
    ),
    Fault(
        "flat groups only", rewards(lambda *_: 1.0),
        {"rollout/flat_frac": 1.0, "rollout/filled_frac": 1.0, "learner/grad_norm": 0.0, "loss/policy": 0.0},
    ),
    Fault(
        "flat groups kept", rewards(lambda prompt, sample: float(sample % 2 and prompt != 1)),
        {"rollout/groups": 4.0, "rollout/flat_frac": 0.25}, settings=("algo.drop_flat_groups=false",),
    ),
    Fault("a response of length 0", sampled(lambda done: cut_to_nothing(done[0]))),
    Fault(
        "no response has a token", sampled(lambda done: [cut_to_nothing(c) for c in done]),
        {"response/length_mean": 0.0, "learner/grad_norm": 0.0, "loss/policy": 0.0},
    ),
    Fault(
        "responses as long as the model reads", never_stop,
        {"response/cut_frac": 1.0, "response/length_mean": 27.0}, settings=("sampler.max_new_tokens=27",),
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def learners():
    made = Learners()
    yield made
    made.close()


def bits(run: Run) -> list[torch.Tensor]:
    """Weights, master weights, moments and step counts."""
    policy = run.learners.policy
    return [*optimizer_bits(policy), *(p.detach().clone() for p in policy.model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(-1).nan_to_num(7), y.view(-1).nan_to_num(7)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_a_fault_in_the_numbers_is_handled_as_the_recipe_says(fault, learners, tmp_path, capsys):
    run, metrics = begin(config(tmp_path, *SETTINGS, *fault.settings), tmp_path, learners)
    rewards(lambda prompt, sample: float(sample % 2))(run)
    fault.spoil(run)
    before = bits(run)
    with metrics, pytest.raises(UserError) if fault.stops else contextlib.nullcontext() as stopped:
        run.train_step()
    said = str(stopped.value) if stopped else capsys.readouterr().out
    assert fault.named in said
    assert same(before, bits(run)) == fault.skipped
    if fault.stops:
        return
    assert all(t.isfinite().all() for t in bits(run))
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record.pop("step") == 1 and undocumented(record) == []
    assert {key: record.get(key) for key in fault.says} == fault.says


def test_after_a_skipped_step_training_goes_on(learners, tmp_path):
    run, metrics = begin(config(tmp_path, *SETTINGS), tmp_path, learners)
    rewards(lambda prompt, sample: float(sample % 2))(run)
    with metrics:
        for spoiled in (False, True, False):
            hook = parameter(run, "experts.linear_fc2.weight").register_hook(lambda g, s=spoiled: g * (NAN if s else 1))
            before = bits(run)
            run.train_step()
            hook.remove()
            assert same(before, bits(run)) == spoiled
            assert all(t.isfinite().all() for t in bits(run))
