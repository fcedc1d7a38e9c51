"""What a single value or a pair of values must satisfy beyond its type. One function per concern; all raise UserError.

What the precision rules must satisfy is in rules.py, and what they decide in plan_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable

from minite.config.build import nearest
from minite.config.operands import GRADIENT_CHOICES
from minite.config.schema import RunConfig
from minite.errors import UserError
from minite.models import FAMILIES

# Settings that take one of a few words. The words are explained beside the field in schema.py.
CHOICES: dict[str, tuple[str, ...]] = {
    "model.kind": tuple(FAMILIES),
    "model.dtype": ("bf16", "fp32"),
    "precision.kv_cache": ("bf16", "fp8"),
    "precision.lm_head_dtype": ("fp32", "bf16"),
    "precision.alignment": ("off", "aligned", "strict"),
    "precision.backend": ("auto", "native", "triton", "cpu", "reference", "te"),  # of backends/registry.py, and slime's
    "data.kind": ("arithmetic", "modular", "jsonl", "reasoning_gym"),
    "data.bad_reward": ("skip", "stop"),
    "learner.bad_gradient": ("skip", "stop"),
    "learner.device": ("auto", "cpu", "cuda"),
    "sampler.kind": ("embedded", "sglang"),
    "sampler.device": ("auto", "cpu", "cuda"),
    "sampler.transport": ("packed", "model_dtype"),
    "correction.kind": ("none", "tis", "icepop", "triage"),
    "correction.narrowing": ("keep", "truncate"),
    "correction.unhealthy": ("warn", "skip", "stop"),
    "driver.placement": ("colocated", "separate"),
    "monitor.on_drift": ("warn", "lower_lr", "switch", "stop"),
    "slime.quantization": ("modelopt", "minite"),
}

# What monitor.watch may name; minite/diagnostics/monitor.py says what each is.
SIGNALS = ("gap", "tail", "ess", "router", "entropy_rise", "entropy_fall")

# Bounds of single numbers: expectation in words, test, settings. None (a setting left open) passes.
LARGEST = 1 << 24  # sizes beyond it would be worked on for hours, or fill the memory, before anything failed
MODULES = 1 << 16  # layers times experts; each has several linears, which the plan lists one by one
_Bound = tuple[str, Callable[[float], bool], str]
BOUNDS: tuple[_Bound, ...] = (
    (
        "at least 1",
        lambda x: x >= 1,
        "model.num_layers model.hidden_size model.num_heads model.num_kv_heads model.head_dim model.vocab_size "
        "model.max_seq_len learner.tensor_parallel learner.expert_parallel "
        "learner.data_parallel learner.tokens_per_microbatch sampler.count sampler.max_batch sampler.kv_tokens "
        "sampler.max_new_tokens sampler.tensor_parallel "
        "algo.prompts_per_step algo.minibatches warm_start.batch_size correction.window "
        "driver.steps driver.num_cpus driver.threads driver.checkpoint_every driver.checkpoints_kept driver.eval_every "
        "data.max_operand data.questions monitor.window slime.nodes slime.gpus_per_node slime.gpus_per_engine",
    ),
    (
        f"at most {LARGEST}, more than any model or run has",
        lambda x: x <= LARGEST,
        "model.hidden_size model.intermediate_size model.moe_intermediate_size model.num_heads model.num_kv_heads "
        "model.head_dim model.vocab_size model.max_seq_len learner.tensor_parallel learner.expert_parallel "
        "learner.data_parallel sampler.count sampler.max_batch algo.prompts_per_step algo.group_size "
        "warm_start.batch_size data.questions",
    ),
    ("at least 2, so that a group has something to compare", lambda x: x >= 2, "algo.group_size"),
    ("at least 5, so that its noise can be estimated", lambda x: x >= 5, "monitor.baseline"),
    (
        "0 or more",
        lambda x: x >= 0,
        "warm_start.steps learner.lr learner.min_lr learner.warmup_steps learner.weight_decay "
        "sampler.top_k algo.kl_coef algo.entropy_coef algo.max_resample algo.clip_high data.heldout "
        "driver.eval_temperature driver.retries model.intermediate_size model.num_experts model.experts_per_token "
        "model.moe_intermediate_size monitor.slack seed",
    ),
    (
        "more than 0",
        lambda x: x > 0,
        "model.rope_theta model.rms_norm_eps model.init_std learner.clip_grad warm_start.lr sampler.temperature "
        "data.reward_timeout driver.timeout "
        "correction.limit_negative correction.limit_positive correction.power correction.segment_risk "
        "monitor.threshold",
    ),
    ("more than 0 and at most 1", lambda x: 0 < x <= 1, "sampler.top_p"),
    (
        "between 0 and 1",
        lambda x: 0 <= x <= 1,
        "warm_start.wrong_frac correction.calm_quantile correction.calm_decay correction.response_tail_frac "
        "correction.max_dropped_frac",
    ),
    ("more than 0 and below 1", lambda x: 0 < x < 1, "slime.memory_fraction monitor.lr_factor"),
    ("at least 0 and below 1", lambda x: 0 <= x < 1, "learner.beta1 learner.beta2 algo.clip_low"),
    ("more than 1", lambda x: x > 1, "algo.dual_clip"),
    ("a port from 1 to 65535", lambda x: 1 <= x <= 65535, "driver.prometheus_port"),
    ("0 or 1", lambda x: x in (0, 1), "driver.ahead"),
)


def check_run(config: RunConfig) -> None:
    """Every check below, in an order that reports the simplest mistake first."""
    check_choices(config)
    check_bounds(config)
    check_model(config)
    check_data(config)
    check_parallel(config)
    check_batch(config)
    check_lengths(config)
    check_schedule(config)
    check_correction(config)
    check_monitor(config)
    check_driver(config)
    check_sampler(config)


def _get(config: RunConfig, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _fail(config: RunConfig, path: str, message: str) -> UserError:
    return UserError(f"{config.where(path)}: {path} is {_get(config, path)!r}: {message}")


def check_choices(config: RunConfig) -> None:
    for path, known in CHOICES.items():
        value = _get(config, path)
        if value not in known:
            raise _fail(config, path, f"expected one of {', '.join(known)}; {nearest(str(value), known)}")
    for name, fmt in config.precision.formats.items():
        for gradient in ("dgrad", "wgrad"):
            value, path = getattr(fmt, gradient), f"precision.formats.{name}.{gradient}"
            if value not in GRADIENT_CHOICES:
                raise UserError(
                    f"{config.where(path)}: {path} is {value!r}: expected one of {', '.join(GRADIENT_CHOICES)}; "
                    "gradient GEMMs run in BF16 on the original operands or on the dequantized ones, or in NVFP4"
                )


def check_bounds(config: RunConfig) -> None:
    for expected, holds, paths in BOUNDS:
        for path in paths.split():
            value = _get(config, path)
            if isinstance(value, int | float) and not holds(value):
                raise _fail(config, path, f"expected {expected}")


def check_model(config: RunConfig) -> None:
    m = config.model
    if m.num_heads % m.num_kv_heads:
        raise _fail(config, "model.num_heads", f"expected a multiple of num_kv_heads {m.num_kv_heads}")
    if m.head_dim % 2:
        raise _fail(config, "model.head_dim", "expected an even number; RoPE rotates pairs")
    needed = FAMILIES[m.kind].mlp_sizes
    for name in dict.fromkeys(size for family in FAMILIES.values() for size in family.mlp_sizes):
        if name in needed and not getattr(m, name):
            raise _fail(config, f"model.{name}", f"kind {m.kind} needs it; set it to at least 1")
        if name not in needed and getattr(m, name):
            raise _fail(config, f"model.{name}", f"kind {m.kind} does not use it; remove it or change model.kind")
    if m.num_layers * max(m.num_experts, 1) > MODULES:
        raise _fail(config, "model.num_layers", f"expected at most {MODULES} layers times experts, of {m.num_experts}")
    if m.experts_per_token > m.num_experts:
        raise _fail(config, "model.experts_per_token", f"expected at most num_experts {m.num_experts}")
    if m.experts_per_token == 1:  # its probability would always be 1, and megatron refuses a router that cannot learn
        raise _fail(config, "model.experts_per_token", "expected at least 2, or num_experts: 0 for a dense model")


def check_data(config: RunConfig) -> None:
    d = config.data
    if d.kind == "jsonl" and not d.path:
        raise _fail(config, "data.path", "kind jsonl needs a file; set data.path")
    if d.kind != "jsonl" and d.path is not None:
        raise _fail(config, "data.path", f"kind {d.kind} makes its own questions; remove it or set data.kind: jsonl")
    if d.kind == "reasoning_gym" and not d.tasks:
        raise _fail(config, "data.tasks", "kind reasoning_gym needs tasks, such as {chain_sum: {max_terms: 2}}")
    if d.kind != "reasoning_gym" and d.tasks:
        raise _fail(config, "data.tasks", "only kind reasoning_gym has tasks; remove them or set the kind")
    if d.kind in ("jsonl", "reasoning_gym") and config.warm_start.wrong_frac:
        raise _fail(config, "warm_start.wrong_frac", "only questions that the recipe makes can be answered wrongly")
    if d.chat_template and d.tokenizer == "chars":
        raise _fail(config, "data.chat_template", "tokenizer chars has none; remove it or set data.tokenizer")
    parts = d.reward.split(".")
    if d.reward != "task" and (len(parts) < 2 or not all(part.isidentifier() for part in parts)):
        raise _fail(config, "data.reward", "expected task, or module.function that Python can import")
    unknown = [op for op in d.operations if op not in ("+", "-", "*")]
    if unknown or not d.operations:
        raise _fail(config, "data.operations", "expected some of + - *")


def check_parallel(config: RunConfig) -> None:
    m, tp = config.model, config.learner.tensor_parallel
    for name in ("num_heads", "num_kv_heads", "vocab_size"):
        if getattr(m, name) % tp:
            nearby = max(t for t in range(1, tp) if m.num_kv_heads % t == 0 and getattr(m, name) % t == 0)
            raise _fail(config, "learner.tensor_parallel", f"does not divide {name} {getattr(m, name)}; {nearby} would")
    ep = config.learner.expert_parallel
    if ep > 1 and not m.num_experts:
        raise _fail(config, "learner.expert_parallel", f"model kind {m.kind} has no experts; expected 1")
    if ep > 1 and m.num_experts % ep:
        raise _fail(config, "learner.expert_parallel", f"does not divide num_experts {m.num_experts}")
    dp = config.learner.data_parallel
    if dp > 1 and dp % ep:
        raise _fail(config, "learner.expert_parallel", f"does not divide data_parallel {dp}; leave one of them at 1")


def check_batch(config: RunConfig) -> None:
    a = config.algo
    responses = a.prompts_per_step * a.group_size
    if a.prompts_per_step % a.minibatches:
        raise _fail(
            config,
            "algo.minibatches",
            f"a minibatch would hold {responses / a.minibatches:.1f} responses, which group_size {a.group_size} does "
            f"not divide; expected a divisor of algo.prompts_per_step {a.prompts_per_step}",
        )
    ranks = config.learner.data_ranks
    if (responses // a.minibatches) % ranks:
        raise _fail(
            config,
            "algo.prompts_per_step",
            f"a minibatch holds {responses // a.minibatches} responses, which {ranks} data-parallel ranks do not "
            "divide; change prompts_per_step, algo.minibatches or learner.data_parallel",
        )


def check_lengths(config: RunConfig) -> None:
    s, limit = config.sampler, config.model.max_seq_len
    if s.max_new_tokens >= limit:
        limit_text = f"model.max_seq_len {limit} ({config.where('model.max_seq_len')})"
        raise _fail(config, "sampler.max_new_tokens", f"leaves no room for a prompt in {limit_text}; lower it")
    if s.kv_tokens <= s.max_new_tokens:
        raise _fail(
            config,
            "sampler.kv_tokens",
            f"cannot hold one response of sampler.max_new_tokens {s.max_new_tokens} and its prompt; raise it",
        )


def check_schedule(config: RunConfig) -> None:
    x = config.learner
    if x.min_lr is not None and x.min_lr > x.lr:
        raise _fail(config, "learner.min_lr", f"expected at most learner.lr {x.lr}")
    updates = config.driver.steps * config.algo.minibatches
    if x.warmup_steps > updates:
        raise _fail(config, "learner.warmup_steps", f"the run makes only {updates} optimizer steps; lower it")


def check_correction(config: RunConfig) -> None:
    c = config.correction
    if not 0 < c.ratio_low <= 1 <= c.ratio_high:
        bounds = f"0 < ratio_low <= 1 <= ratio_high, with ratio_high {c.ratio_high}"
        raise _fail(config, "correction.ratio_low", f"expected {bounds}")
    if isinstance(c.calm, str) and c.calm != "auto":
        raise _fail(config, "correction.calm", "expected a number [nats] or auto")
    if isinstance(c.calm, float) and c.calm < 0:
        raise _fail(config, "correction.calm", "expected 0 or more [nats]")
    if isinstance(c.calm, float) and c.kind == "triage" and c.limit_negative <= c.calm:
        raise _fail(config, "correction.limit_negative", f"expected more than correction.calm {c.calm}")
    if c.limit_positive < c.limit_negative:
        raise _fail(config, "correction.limit_positive", f"expected at least limit_negative {c.limit_negative}")


def check_monitor(config: RunConfig) -> None:
    m = config.monitor
    for name in m.watch:
        if name not in SIGNALS:
            raise _fail(config, "monitor.watch", f"{name!r} is no signal; {nearest(name, SIGNALS)}")
    if "router" in m.watch and not (config.model.num_experts and config.algo.router_replay):
        raise _fail(config, "monitor.watch", "router needs a model with experts and algo.router_replay: true")
    if m.switch and m.on_drift != "switch":
        raise _fail(config, "monitor.switch", f"on_drift is {m.on_drift}; set monitor.on_drift: switch or remove it")
    if m.on_drift == "switch" and not m.switch:
        raise _fail(config, "monitor.switch", 'on_drift switch needs patterns of modules, e.g. ["**.mlp.**"]')
    if m.on_drift != "warn" and not m.watch:
        raise _fail(config, "monitor.watch", f"on_drift {m.on_drift} needs a signal to watch, e.g. [gap, tail]")


def check_driver(config: RunConfig) -> None:
    if config.driver.ahead and config.driver.placement != "separate":
        raise _fail(
            config,
            "driver.ahead",
            f"a rollout ahead needs samplers of their own, but driver.placement is {config.driver.placement}; "
            "set driver.placement: separate or driver.ahead: 0",
        )


def check_sampler(config: RunConfig) -> None:
    if config.sampler.kind != "sglang" and config.sampler.tensor_parallel > 1:
        raise _fail(config, "sampler.tensor_parallel", "only SGLang has it; set it to 1 or -o sampler=sglang")
    if config.sampler.kind != "sglang" and config.sampler.server:
        raise _fail(config, "sampler.server", "only SGLang has it; set it to false or -o sampler=sglang")
    if config.sampler.kind != "sglang" and config.sampler.transport != "packed":
        raise _fail(config, "sampler.transport", "only SGLang has it; set it to packed or -o sampler=sglang")
