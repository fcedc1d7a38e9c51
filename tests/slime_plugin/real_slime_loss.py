"""Checks of real_slime.py: slime's loss, its log and a restart, with the plugin's weights."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest import mock

import tiny_slime  # first: it makes slime importable
import torch
from slime.backends.megatron_utils import loss as slime_loss
from slime.observability import train_metric_utils
from tiny_slime import log_probs, logits, microbatch, random_weights, recipe, refused, slime_args

from minite.losses.correction import correct
from minite.losses.grpo import grpo_loss
from minite.losses.triage_state import TriageState
from slime_plugin import hooks, loss
from slime_plugin.model import build


def rollout(args: Any, model: torch.nn.Module, seed: int = 5) -> dict[str, Any]:
    """A rollout whose sampler disagrees with the learner: some tokens calm, some far off, one not finite."""
    batch = microbatch(tiny_slime.LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    old = log_probs(args, model, batch)
    batch["rollout_log_probs"] = [x + 0.4 * torch.randn(x.shape, generator=generator) for x in old]
    batch["rollout_log_probs"][1][2] = float("-inf")
    random_shift = [0.1 * torch.randn(x.shape, generator=generator) for x in old]
    batch["log_probs"] = [x + shift for x, shift in zip(old, random_shift, strict=True)]  # the policy has moved since
    return batch


def minite_weights(config: Any, data: dict[str, Any]) -> torch.Tensor:
    """minite.losses on the packed rollout, as the driver of `minite train` calls it."""
    cat = {key: torch.cat(data[key]) for key in ("log_probs", "rollout_log_probs", "advantages", "loss_masks")}
    sequence_T = torch.repeat_interleave(torch.arange(3), torch.tensor(data["response_lengths"]))
    mask_T = cat["loss_masks"].bool()
    out = correct(
        config.correction, cat["log_probs"], cat["rollout_log_probs"], cat["advantages"], mask_T, sequence_T,
        TriageState(),
    )  # fmt: skip
    return out.weight_T


def check_triage_in_slimes_policy_loss() -> None:
    for overrides in ((), ("correction.calm=0.05", "algo.dual_clip=3.0", "algo.entropy_coef=0.01")):
        args = slime_args(*overrides)
        config, _ = recipe(args)
        model = build(args)
        random_weights(model)
        data = rollout(args, model)
        expected_T = minite_weights(config, data)
        hooks._triage.calm, hooks._last_rollout = None, None
        hooks.postprocess(args, 0, data)
        weight_T = loss.BOOK.read(data["rollout_log_probs"])
        assert torch.equal(weight_T, expected_T)  # to the bit
        assert 0 < int((weight_T == 0).sum()) < int((weight_T < 1).sum()) < weight_T.numel()
        losses, gradients = [], []
        for loss_type in ("policy_loss", "custom_loss"):
            args.loss_type = loss_type
            out_TV = logits(model, data).detach().requires_grad_()
            value, count, log = slime_loss.loss_function(args, data, 1, 3, out_TV)
            value.backward()
            losses.append(float(value))
            gradients.append(out_TV.grad)
            named = dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))
            if loss_type == "policy_loss":
                masked = (weight_T * torch.cat(data["loss_masks"])).sum()
                assert abs(named["correction_weight"] - float(masked)) < 1e-4
        # slime's loss with the TIS hook, and minite train's: two codes of one formula, FP32 against FP64.
        assert abs(losses[0] - losses[1]) < 1e-5 * max(1, abs(losses[0])), losses
        assert (gradients[0] - gradients[1]).abs().max() < 1e-6
        lists = slime_loss.get_log_probs_and_entropy(
            out_TV, args=args, unconcat_tokens=data["unconcat_tokens"], total_lengths=data["total_lengths"],
            response_lengths=data["response_lengths"], with_entropy=True,
        )[1]  # fmt: skip
        direct = grpo_loss(
            torch.cat(lists["log_probs"]), torch.cat(data["log_probs"]), torch.cat(data["advantages"]),
            torch.cat(data["loss_masks"]).bool(), expected_T, 1.0, config.algo,
            entropy_T=torch.cat(lists["entropy"]) if config.algo.entropy_coef else None,
        )  # fmt: skip
        assert float(direct.loss.float()) == losses[1]


def check_metrics_pass_slimes_log() -> None:
    args = slime_args()
    model = build(args)
    random_weights(model)
    data = rollout(args, model)
    data["rollout_log_probs"][1][2] = data["log_probs"][1][2]  # slime's own mean of it would be infinite
    hooks._triage.calm, hooks._last_rollout = None, None
    hooks.postprocess(args, 0, data)
    for key in ("tokens", "packed_seq_params", "unconcat_tokens"):
        del data[key]
    data["global_batch_sizes"] = [3]
    vars(args).update(
        ci_test=False, log_multi_turn=False, log_passrate=False, log_correct_samples=False, rollout_batch_size=1,
        n_samples_per_prompt=3, global_batch_size=3, wandb_always_use_train_step=False,
    )  # fmt: skip
    with mock.patch.object(train_metric_utils.logging_utils, "log") as log:
        train_metric_utils.log_rollout_data(0, args, data)
    logged = log.call_args[0][1]
    gap = (torch.cat(data["log_probs"]) - torch.cat(data["rollout_log_probs"])).double().abs()
    mean = float(gap[torch.cat(data["loss_masks"]).bool()].mean())
    assert abs(logged["rollout/gap/abs_mean"] - mean) < 1e-7, logged
    assert {"rollout/triage/tail_frac", "rollout/correction/dropped_frac", "rollout/ratio/ess"} <= logged.keys()


def check_state_survives_a_restart() -> None:
    with tempfile.TemporaryDirectory() as save:
        args = slime_args("correction.calm=auto", save=save, load=save)
        model = build(args)
        random_weights(model)
        hooks._triage.calm, hooks._last_rollout = None, None
        first, second = rollout(args, model, seed=5), rollout(args, model, seed=6)
        hooks.postprocess(args, 0, first)
        before = first["gap/abs_mean"][0]
        hooks.postprocess(args, 1, second)
        expected, weight_T = hooks._triage.calm, loss.BOOK.read(second["rollout_log_probs"])
        hooks._triage.calm, hooks._last_rollout = None, None
        hooks.postprocess(args, 0, rollout(args, model, seed=6))
        assert hooks._triage.calm != expected  # without what was before, it would be another
        os.remove(f"{save}/minite/state.jsonl")
        hooks._triage.calm, hooks._last_rollout = None, None
        hooks.postprocess(args, 0, first)
        hooks._triage.calm, hooks._last_rollout = None, None  # a new process, at a checkpoint of rollout 0
        again = rollout(args, model, seed=6)
        with mock.patch.object(hooks.logger, "info") as told:
            hooks.postprocess(args, 1, again)
        assert hooks._triage.calm == expected
        assert torch.equal(loss.BOOK.read(again["rollout_log_probs"]), weight_T)
        assert told.call_args[0][1:] == (second["gap/abs_mean"][0], before)
        hooks._last_rollout = None
        refused(lambda: hooks.postprocess(args, 9, rollout(args, model)), "has no line for rollout 8")
