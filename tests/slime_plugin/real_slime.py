"""A process of its own: the plugin's hooks called by slime's real functions. Prints {check: null or traceback}.

python real_slime.py SLIME_DIR MEGATRON_DIR
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tiny_slime
import torch
from slime.backends.megatron_utils import actor, megatron_to_hf, model_provider
from slime.backends.megatron_utils import loss as slime_loss
from slime.backends.megatron_utils.update_weight import update_weight_from_distributed as updates
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.observability import train_metric_utils
from slime.utils.routing_replay import RoutingReplay
from tiny_slime import microbatch, random_weights, slime_args

from minite.backends.registry import get_backend
from minite.config import config_from_dict, resolve_plan
from minite.errors import UserError
from minite.learner.model import PolicyModel, policy_config
from minite.learner.precision import bind
from minite.losses.correction import correct
from minite.losses.grpo import grpo_loss
from minite.losses.triage_state import TriageState
from minite.models import get_model
from minite.models.hf_config import write_hf_config
from minite.sync.export import FormatQuantizer, pack
from minite.sync.modelopt import quantization_config
from minite.sync.targets import to_disk
from minite.sync.verify import compare
from slime_plugin import hooks, loss, patches
from slime_plugin.export import QuantizeParams
from slime_plugin.model import build

LENGTHS = [(4, 9), (3, 5), (2, 12)]
ORIGINAL = megatron_to_hf.quantize_params


def recipe(args: Any) -> tuple[Any, Any]:
    config = config_from_dict(args.minite["recipe"], "test")
    return config, resolve_plan(config)


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Under the two wrappers (DDP, Float16Module) that slime's names begin with."""
    for _ in range(2):
        outer = torch.nn.Module()
        outer.module, outer.config = model, model.config
        model = outer
    return model


def exported(args: Any, model: torch.nn.Module, quantization: Any) -> dict[str, torch.Tensor]:
    """What slime would send."""
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in named_params_and_buffers(args, [wrapped(model)]):
        for hf_name, part in megatron_to_hf.convert_to_hf(args, "Qwen3MoeConfig", name, tensor.data, quantization):
            assert hf_name not in sent
            sent[hf_name] = part.clone()
    return sent


def check_slime_sends_the_plans_codes(kind: str = "moe") -> None:
    overrides = DENSE if kind == "dense" else ()
    args = slime_args(*overrides)
    config, plan = recipe(args)
    if kind == "dense":
        args.num_experts = None
    model = build(args)
    random_weights(model)
    plain = exported(args, model, None)
    assert {name: tuple(t.shape) for name, t in plain.items()} == get_model(config.model.kind).hf_tensors(config.model)
    # slime alone: BF16 for a quant_method that it does not know. This is what the plugin is for.
    assert compare(exported(args, model, quantization_config(plan)), plain) is None
    patches.replace_quantize_params(QuantizeParams(plan, FormatQuantizer()))
    got = exported(args, model, quantization_config(plan))
    expected: dict[str, torch.Tensor] = {}
    for _, group in pack(plan, plain.items(), FormatQuantizer()):
        expected |= to_disk("nvfp4", plan, group, {})
    assert compare(got, expected) is None, compare(got, expected)
    assert sum(t.dtype == torch.float8_e4m3fn for t in got.values()) == sum(e.quantized for e in plan) > 0


DENSE = (
    "model.kind=qwen3", "model.intermediate_size=128", "model.num_experts=0", "model.experts_per_token=0",
    "model.moe_intermediate_size=0", "algo.router_replay=false",
    "precision.rules=[{layers: [0, -1], use: bf16}, {match: 'model.layers.**', use: w4a4}, {match: '**', use: bf16}]",
)  # fmt: skip


def check_dense_names_too() -> None:
    check_slime_sends_the_plans_codes("dense")


def check_logits_are_those_of_minite_train() -> None:
    args = slime_args()
    config, plan = recipe(args)
    ours = build(args)
    random_weights(ours)
    own_config = policy_config(config, plan, torch.device("cpu"))
    reference = PolicyModel(own_config, config)
    bind(
        reference,
        plan,
        get_backend(plan.backend, device="cpu", strict=False),
        tiny_slime.parallel_state.get_tensor_model_parallel_group(),
    )
    full = {name: tensor for name, tensor in exported(args, ours, None).items()}
    ops = get_model(config.model.kind).megatron_ops(config.model)
    with torch.no_grad():
        parameters = dict(reference.named_parameters())
        for name, tensor in ops.from_hf(full).items():
            target = parameters.pop(name, None)
            if target is None:  # one expert of a stack
                stem, _, number = name.rpartition("weight")
                dict(reference.named_parameters())[f"{stem}weight"][int(number)].copy_(tensor)
                parameters.pop(f"{stem}weight", None)
            else:
                target.copy_(tensor)
        assert not parameters, list(parameters)
    batch = microbatch(LENGTHS)
    tokens_T = batch["tokens"][0]
    first_T = torch.zeros_like(tokens_T, dtype=torch.bool)
    starts = batch["packed_seq_params"].cu_seqlens_q[:-1].long()
    first_T[starts] = True
    position_T = torch.cat([torch.arange(n) for n in batch["total_lengths"]])
    packed = SimpleNamespace(
        tokens_T=tokens_T, cu_seqlens=batch["packed_seq_params"].cu_seqlens_q, position_T=position_T, first_T=first_T,
        replay_TLk=None,
    )  # fmt: skip
    expected_T = reference.token_logprobs(packed, 1.0, entropy=False)[0].detach()
    got = log_probs(args, ours, batch)
    offset = 0
    for total, response, mine in zip(batch["total_lengths"], batch["response_lengths"], got, strict=True):
        offset += total
        theirs = expected_T[offset - response : offset]
        assert (mine - theirs).abs().max() < 2e-6, (mine, theirs)  # two orders of one FP32 log-softmax


def logits(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """As slime calls the model."""
    result: torch.Tensor = model(
        input_ids=batch["tokens"], position_ids=None, attention_mask=None, labels=None,
        packed_seq_params=batch["packed_seq_params"], loss_mask=None,
    )  # fmt: skip
    return result


def log_probs(args: Any, model: torch.nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    lists = slime_loss.get_log_probs_and_entropy(
        logits(model, batch), args=args, unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"],
    )[1]  # fmt: skip
    return [x.detach() for x in lists["log_probs"]]


def rollout(args: Any, model: torch.nn.Module) -> dict[str, Any]:
    """A rollout whose sampler disagrees with the learner: some tokens calm, some far off, one not finite."""
    batch = microbatch(LENGTHS)
    generator = torch.Generator().manual_seed(5)
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
        hooks.postprocess(args, 0, rollout(args, model))
        calm = hooks._triage.calm
        assert calm is not None
        hooks.postprocess(args, 1, rollout(args, model))
        after = hooks._triage.calm
        hooks._triage.calm, hooks._last_rollout = None, None  # a new process, at a checkpoint of rollout 0
        with mock.patch.object(hooks.logger, "info") as told:
            hooks.postprocess(args, 1, rollout(args, model))
        assert hooks._triage.calm == after
        assert told.call_args[0][1] == told.call_args[0][2] > 0  # the gap after the restart, and before it
        hooks._last_rollout = None
        refused(lambda: hooks.postprocess(args, 9, rollout(args, model)), "has no line for rollout 8")


def refused(call: Any, expected: str) -> None:
    try:
        call()
    except UserError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"not refused: {expected}")


def check_stale_weights_are_forgotten() -> None:
    args = slime_args()
    model = build(args)
    random_weights(model)
    batch = microbatch(LENGTHS)
    first = logits(model, batch).detach()
    for parameter in model.parameters():  # as slime restores the reference model: torch does not see it
        parameter.data.view(-1)[:] = parameter.data.view(-1).flip(0)
    stale = logits(model, batch).detach()
    hooks.before_log_prob(args, [wrapped(model)], "ref_")
    fresh = logits(model, batch).detach()
    again = build(args)
    again.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(fresh, logits(again, batch).detach())
    assert not torch.equal(stale, fresh) and not torch.equal(first, fresh)
    for parameter in model.parameters():
        parameter.data.view(-1)[:] = parameter.data.view(-1).flip(0)
    hooks.before_train_step(args, 0, 0, [wrapped(model)], None, None)
    assert torch.equal(logits(model, batch).detach(), first)


def check_slime_replays_the_samplers_experts() -> None:
    os.environ |= {"ENABLE_ROUTING_REPLAY": "1", "ROUTING_REPLAY_STAGE": "fallthrough"}
    RoutingReplay.all_routing_replays.clear()
    try:
        args = slime_args()
        model = build(args)
        random_weights(model)
        batch = microbatch(LENGTHS)
        free = logits(model, batch).detach()
        tokens, layers = batch["tokens"].numel(), len(RoutingReplay.all_routing_replays)
        assert layers == recipe(args)[0].model.num_layers
        routers = [module for module in model.modules() if type(module).__name__ == "SlimeRouter"]
        own = [router.replay_Tk.clone() for router in routers]
        other = [torch.randint(0, 4, (tokens, 1)) + torch.tensor([0, 4]) for _ in routers]
        for chosen, differs in ((own, False), (other, True)):
            for replay, experts_Tk in zip(RoutingReplay.all_routing_replays, chosen, strict=True):
                replay.clear()
                # record() would pin the memory, which needs CUDA
                replay.top_indices_list.append(
                    SimpleNamespace(materialize_for_routing_replay=lambda _, e=experts_Tk: e)
                )
            for stage in ("replay_forward", "replay_backward"):
                os.environ["ROUTING_REPLAY_STAGE"] = stage
                assert torch.equal(logits(model, batch).detach(), free) is not differs
            assert all(torch.equal(r.replay_Tk, e) for r, e in zip(routers, chosen, strict=True))
            RoutingReplay.assert_all_consumed()
    finally:
        os.environ["ENABLE_ROUTING_REPLAY"] = "0"


def check_slime_builds_the_model_by_the_hook() -> None:
    args = slime_args()
    with mock.patch("megatron.training.get_args", lambda: args):
        provide = model_provider._get_model_provider_func(args)
        assert type(provide(pre_process=True, post_process=True)).__name__ == "SlimePolicy"
        refused(lambda: provide(pre_process=True, post_process=False), "not cut by layers")


def check_init_patches_and_refuses() -> None:
    with tempfile.TemporaryDirectory() as directory:
        args = slime_args(hf_checkpoint=directory)
        config, plan = recipe(args)
        good = {**write_hf_config(config.model), "quantization_config": quantization_config(plan)}

        def start(**changes: Any) -> None:
            (Path(directory) / "config.json").write_text(json.dumps({**good, **changes}))
            hooks.init(args)

        refused(lambda: start(quantization_config=None), "holds BF16, but the plan quantizes")
        unknown = {**good["quantization_config"], "quant_method": "mxfp4"}
        refused(lambda: start(quantization_config=unknown), "quant_method is 'mxfp4', the plan needs 'modelopt'")
        args.minite = {**args.minite, "plan_digest": "0" * 64}
        refused(start, "was launched as 000000000000")
        refused(lambda: hooks.init(slime_args(minite=None)), "start slime with minite launch")
        assert megatron_to_hf.quantize_params is ORIGINAL
        args = slime_args(hf_checkpoint=directory)
        start()
        assert isinstance(megatron_to_hf.quantize_params, QuantizeParams)
        assert issubclass(actor.UpdateWeightFromDistributed, updates.UpdateWeightFromDistributed)
        assert actor.UpdateWeightFromDistributed.__name__ == "ReprocessingUpdateWeightFromDistributed"
        incomplete = [("model.layers.1.self_attn.q_proj.weight", torch.zeros(64, 64))]
        refused(lambda: megatron_to_hf.quantize_params(args, "linear_qkv", incomplete, {}), "one outer scale")


def check_engines_process_weights_again() -> None:
    for name, home in patches.UPDATERS.items():
        patches.check_updater(getattr(__import__(home, fromlist=[name]), name))
    calls: list[Any] = []

    class Remote:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *args, **kwargs: calls.append((method, *kwargs.values())))

    for quantization in (quantization_config(recipe(slime_args())[1]),):
        for cls, expected in ((updates.UpdateWeightFromDistributed, 0), (None, 2)):
            cls = cls or patches.reprocessing(updates.UpdateWeightFromDistributed)
            with (
                mock.patch.object(updates.ray, "get", lambda refs: refs),
                mock.patch.object(updates, "get_gloo_group", lambda: None),
            ):
                updater = cls(None, [], dict, model_name="x", quantization_config=quantization)
                updater.rollout_engines, updater._is_pp_src_rank = [Remote()], False
                updater._send_weights = lambda _: calls.append(("send",))
                calls.clear()
                updater.update_weights()
            kept = [call for call in calls if call[0] in ("send", "post_process_weights")]
            assert len(kept) == 1 + expected
            if expected:  # restore, send, process
                assert kept == [("post_process_weights", True, False), ("send",), ("post_process_weights", False, True)]


def main() -> None:
    tiny_slime.start()
    results: dict[str, str | None] = {}
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        megatron_to_hf.quantize_params = ORIGINAL
        try:
            check()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


main()
