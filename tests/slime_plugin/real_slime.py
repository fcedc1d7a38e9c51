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

import real_slime_loss
import real_slime_state
import tiny_slime
import torch
from slime.backends.megatron_utils import actor, megatron_to_hf, model_provider
from slime.backends.megatron_utils.update_weight import update_weight_from_distributed as updates
from slime.utils.routing_replay import RoutingReplay
from tiny_slime import (
    DENSE,
    LENGTHS,
    exported,
    log_probs,
    logits,
    microbatch,
    random_weights,
    recipe,
    refused,
    slime_args,
    wrapped,
)

from minite.backends.registry import get_backend
from minite.learner.model import PolicyModel, policy_config
from minite.learner.precision import bind
from minite.models import get_model
from minite.models.hf_config import write_hf_config
from minite.sync.export import FormatQuantizer, pack
from minite.sync.modelopt import quantization_config
from minite.sync.targets import to_disk
from minite.sync.verify import compare
from slime_plugin import hooks, patches
from slime_plugin.export import QuantizeParams
from slime_plugin.model import build

ORIGINAL = megatron_to_hf.quantize_params


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
    for name, check in {**vars(real_slime_loss), **vars(real_slime_state), **globals()}.items():
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
