"""What of slime the plugin relies on, as read in 624b824a: our function, where slime calls it, and with what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """One call of ours by slime."""

    flag: str  # slime's argument
    ours: str
    parameters: tuple[str, ...]  # in slime's order, or its keywords
    file: str  # of slime
    call: str  # as it stands there


SEAMS = (
    Seam(
        "--custom-megatron-init-path",
        "slime_plugin.hooks.init",
        ("args",),
        "slime/backends/megatron_utils/initialize.py",
        "custom_init(args)",
    ),
    Seam(
        "--custom-model-provider-path",
        "slime_plugin.model.provide",
        ("pre_process", "post_process"),
        "slime/backends/megatron_utils/model_provider.py",
        "custom_model_provider(pre_process=pre_process, post_process=post_process)",
    ),
    Seam(
        "--custom-megatron-before-log-prob-hook-path",
        "slime_plugin.hooks.before_log_prob",
        ("args", "model", "store_prefix"),
        "slime/backends/megatron_utils/model.py",
        "custom_before_log_prob_hook(args, model, store_prefix)",
    ),
    Seam(
        "--custom-megatron-before-train-step-hook-path",
        "slime_plugin.hooks.before_train_step",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        "slime/backends/megatron_utils/model.py",
        "custom_before_train_step_hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
    ),
    Seam(
        "--rollout-data-postprocess-path",
        "slime_plugin.hooks.postprocess",
        ("args", "rollout_id", "rollout_data"),
        "slime/backends/megatron_utils/actor.py",
        "self.rollout_data_postprocess(self.args, rollout_id, rollout_data)",
    ),
    Seam(
        "--custom-tis-function-path",
        "slime_plugin.loss.correct_loss",
        (
            "args",
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
        "slime/backends/megatron_utils/loss.py",
        "pg_loss, modified_response_masks, tis_metrics = tis_func(**tis_kwargs)",
    ),
    Seam(
        "--custom-loss-function-path",
        "slime_plugin.loss.grpo",
        ("args", "batch", "logits", "sum_of_sample_mean"),
        "slime/backends/megatron_utils/loss.py",
        "loss, log = func(args, batch, logits, sum_of_sample_mean)",
    ),
    Seam(
        "--custom-rm-path",
        "slime_plugin.reward.math_verify",
        ("args", "sample"),
        "slime/rollout/rm_hub/__init__.py",
        "rm_function(args, sample",
    ),
)
