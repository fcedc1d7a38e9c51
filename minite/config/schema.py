"""Every setting and every default of a recipe. One frozen dataclass per YAML section; nothing else holds a default.

Field comments are the user documentation: `minite plan --schema` prints them. Rules about values live in checks.py.
A section whose dataclass has a ``kind`` may be written as a bare word in YAML: ``sampler: sglang``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and names of the policy. Defaults are those of Qwen3; sizes have none."""

    kind: str  # qwen3 | qwen3_moe | llama (Llama-style, such as SmolLM2)
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int = 0  # width of a dense MLP; qwen3 and llama
    num_experts: int = 0  # qwen3_moe only
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_seq_len: int = 40_960
    dtype: str = "bf16"  # activations and working weights: bf16 | fp32; master weights are always FP32
    checkpoint: str | None = None  # HF safetensors directory to start from; None = random init
    init_std: float = 0.02


@dataclass(frozen=True)
class FormatConfig:
    """Operands of the three GEMMs of a linear. Names come from config/operands.py."""

    weight: str = "bf16"
    input: str = "bf16"
    dgrad: str = (
        "bf16"  # weight used for the input gradient: bf16 = the original | dequantized = what fprop used | nvfp4
    )
    wgrad: str = "bf16"  # input used for the weight gradient: likewise


@dataclass(frozen=True)
class RuleConfig:
    """Which modules use which format: those that match, in these layers. At least one of match and layers."""

    use: str  # a key of precision.formats
    match: str | None = None  # HF module path, whole segments: * one segment, ** any number
    layers: tuple[int, ...] | None = None  # linears of these decoder layers; negative counts from the end


@dataclass(frozen=True)
class PrecisionConfig:
    """The precision of everything. Rules are read top down; the first that matches a module decides."""

    formats: dict[str, FormatConfig] = field(default_factory=dict)  # "bf16" always exists
    rules: tuple[RuleConfig, ...] = (RuleConfig(use="bf16", match="**"),)
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    kv_cache: str = "bf16"  # bf16 | fp8
    lm_head_dtype: str = "fp32"  # dtype of logits: fp32 | bf16
    alignment: str = "aligned"  # off | aligned | strict
    backend: str = "auto"  # auto | a name of backends.registry | te (Transformer Engine; minite launch only)


@dataclass(frozen=True)
class DataConfig:
    """Prompts and rewards."""

    kind: str = "arithmetic"  # arithmetic | modular (both made by the recipe) | jsonl | reasoning_gym (that package)
    path: str | None = None  # jsonl only: lines {"prompt": str, "answer": str}
    tokenizer: str = "chars"  # chars (built in) | a Hugging Face tokenizer directory
    chat_template: bool = False  # prompts are put as a user's message into the tokenizer's chat template
    max_operand: int = 99  # arithmetic, modular
    operations: tuple[str, ...] = ("+",)  # arithmetic only: of + - *
    tasks: dict[str, dict[str, int | float | bool | str | tuple[str, ...]]] = field(
        default_factory=dict
    )  # reasoning_gym
    questions: int = 2000  # reasoning_gym only: of each task
    heldout: int = 256  # prompts never trained on
    reward: str = "task"  # task (its own) | module.function of (response, answer) -> number, in a process of its own
    reward_timeout: float = 30.0  # of one response [s]; a reward that takes longer is bad and its process is ended
    bad_reward: str = "skip"  # a group whose reward raised, hung or is not finite: skip (counted, replaced) | stop


@dataclass(frozen=True)
class WarmStartConfig:
    """Short supervised start made in the run, cached by content under the cache directory. steps 0 = none."""

    steps: int = 0
    batch_size: int = 64
    lr: float = 3e-3
    wrong_frac: float = 0.0  # share of demonstrations that are one too high: a teacher for GRPO to surpass
    cache: bool = True


@dataclass(frozen=True)
class LearnerConfig:
    """Megatron learner."""

    tensor_parallel: int = 1
    expert_parallel: int = 1  # experts are spread over the data-parallel ranks, of which there are at least as many
    data_parallel: int = 1
    device: str = "auto"  # auto | cpu | cuda
    lr: float = 1e-6
    min_lr: float | None = None  # None = constant at lr
    warmup_steps: int = 0  # optimizer steps from 0 up to lr
    weight_decay: float = 0.01  # of AdamW, on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    clip_grad: float = 1.0  # largest norm of the gradient
    bad_gradient: str = "skip"  # an optimizer step whose gradient is not finite: skip (counted, named) | stop
    tokens_per_microbatch: int = 16_384  # whole responses are packed up to this many tokens
    recompute: bool = False  # keep no activations: compute the forward again in the backward

    @property
    def data_ranks(self) -> int:
        """Ranks that see different responses; expert parallelism needs at least as many."""
        return max(self.data_parallel, self.expert_parallel)

    @property
    def world_size(self) -> int:
        """Learner processes."""
        return self.tensor_parallel * self.data_ranks


@dataclass(frozen=True)
class SamplerConfig:
    """Rollout engine."""

    kind: str = "embedded"  # embedded (built in) | sglang
    count: int = 1  # engines, each with all weights
    device: str = "auto"  # auto | cpu | cuda
    max_batch: int = 256  # requests decoded together
    kv_tokens: int = 262_144  # size of the KV cache
    temperature: float = 1.0  # of rollouts, above 0; log-probs of both sides are taken at it
    top_p: float = 1.0  # below 1 only with alignment: off
    top_k: int = 0  # 0 = whole vocabulary; more only with alignment: off
    max_new_tokens: int = 8_192  # of a response
    server: bool = False  # the engine runs as SGLang's HTTP server, on loopback and behind a key; sglang only
    tensor_parallel: int = 1  # processes of one engine, each with a part of every weight; sglang only
    transport: str = "packed"  # of weights: packed (codes, scales) | model_dtype (the engine quantizes; sglang only)


@dataclass(frozen=True)
class AlgoConfig:
    """GRPO."""

    prompts_per_step: int = 32
    group_size: int = 8  # responses to each prompt
    minibatches: int = 1  # optimizer steps per rollout
    normalize_std: bool = True  # divide group advantages by their standard deviation
    clip_low: float = 0.2  # the policy ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    dual_clip: float | None = None  # e.g. 3.0: bound of the loss for negative advantages
    kl_coef: float = 0.0  # k3 KL to the warm-start policy
    entropy_coef: float = 0.0  # above 0 rewards entropy
    router_replay: bool = True  # learner uses the experts that the sampler chose; alignment: aligned needs it
    drop_flat_groups: bool = True  # groups whose rewards are all equal are resampled (dynamic sampling)
    max_resample: int = 2  # extra rollout rounds to fill the batch after drops


@dataclass(frozen=True)
class CorrectionConfig:
    """What is done about the log-prob gap d = old_logprob - sampler_logprob [nats]. See docs/triage.md."""

    kind: str = "triage"  # none | tis | icepop | triage
    ratio_low: float = 0.5  # tis, icepop, triage narrowing: bounds of exp(d)
    ratio_high: float = 2.0
    calm: float | str = 0.1  # triage: |d| up to this is clear; "auto" = running quantile
    calm_quantile: float = 0.95  # of |d|, for calm: auto
    calm_decay: float = 0.9  # of the running quantile, for calm: auto
    limit_negative: float = 0.5  # triage: a widening token is dropped above this |d| [nats], advantage below 0
    limit_positive: float = 1.0  # likewise, advantage above 0
    power: float = 1.0  # triage: weight of a widening token is (calm / |d|) ^ power
    narrowing: str = "keep"  # triage, tokens whose gap the update makes smaller: keep | truncate to the ratio bounds
    window: int = 16  # triage: tokens of a response that are judged together
    segment_risk: float = 0.5  # triage: mean excess over calm [nats] above which a window's widening tokens are dropped
    response_tail_frac: float = 0.2  # triage: share of dropped tokens above which all of a response's widening ones are
    renormalize: bool = False  # divide by kept weight instead of the global token number
    max_dropped_frac: float = 0.5  # share of tokens with weight 0 above which a step is unhealthy
    unhealthy: str = "warn"  # warn | skip | stop: what is done about such a step


@dataclass(frozen=True)
class DriverConfig:
    """The run."""

    steps: int = 100  # rollouts, each trained on in algo.minibatches optimizer steps
    placement: str = "colocated"  # colocated (learner and samplers take turns) | separate
    ahead: int = 0  # 1 = the next rollout is sampled while the learner trains (policy lag 1); needs separate
    num_cpus: int | None = None  # CPUs given to Ray; None = what the machine has
    threads: int = 1  # torch threads of each learner rank and sampler; more only pays for large CPU models
    checkpoint_every: int = 20  # steps; the last step has one too
    checkpoints_kept: int = 3
    eval_every: int = 10  # steps; on data.heldout prompts
    eval_temperature: float = 0.0  # 0 = greedy
    retries: int = 3  # repairs in a row, without a step between, before the run stops; 0 = stop at the first failure
    timeout: float = 3_600.0  # of one call to a learner or sampler, a whole rollout too [s]; longer is taken for a hang
    # Where the metrics of a step go besides metrics.jsonl, see docs/monitoring.md
    tensorboard: bool = True  # event files in the run directory
    prometheus_port: int | None = None  # http://127.0.0.1:PORT/metrics has the newest step; None = no endpoint
    wandb: bool = False  # Weights & Biases, offline unless its own variables say otherwise


@dataclass(frozen=True)
class MonitorConfig:
    """Watches a run for a break of its trend; off without ``watch``. See docs/monitoring.md."""

    watch: tuple[str, ...] = ()  # any of gap, tail, ess, router, entropy_rise, entropy_fall; () = no monitor
    window: int = 10  # steps of the rolling means
    baseline: int = 20  # steps from the start, or from the last drift, whose noise counts as calm
    slack: float = 1.5  # what a step may exceed the calm mean by [standard deviations]
    threshold: float = 8.0  # summed excess that is a drift [standard deviations]; a step adds half of it at most
    on_drift: str = "warn"  # warn | lower_lr | switch | stop
    lr_factor: float = 0.5  # lower_lr: each drift multiplies the learning rate by it
    switch: tuple[str, ...] = ()  # switch: module patterns; each drift puts the next one's inputs to bf16 (W4A16)


@dataclass(frozen=True)
class SlimeConfig:
    """What slime asks and the rest of the recipe does not say; read by `minite launch` only. See docs/slime.md."""

    quantization: str = "modelopt"  # quantized linears of the engines: modelopt = SGLang's own | minite = our backends
    checkpoint: str | None = None  # HF directory that engines start from, of minite convert; None = model.checkpoint
    save: str = "checkpoints"  # directory of megatron checkpoints and of the data state; --resume reads it
    nodes: int = 1
    gpus_per_node: int = 8
    gpus_per_engine: int = 1  # tensor parallelism of an SGLang engine
    memory_fraction: float = 0.7  # of a GPU, for an engine's weights and KV cache
    offload_optimizer: bool = False  # Adam and the FP32 master weights on the CPU
    reward: str = "slime_plugin.reward.math_verify"  # a dotted function, or a word that slime's --rm-type knows
    eval_data: str | None = None  # JSON lines like data.path; None = no evaluation: data.heldout is for minite train
    extra: tuple[str, ...] = ()  # more arguments for slime, word by word; not those that the recipe decides


@dataclass(frozen=True)
class RunConfig:
    """A whole recipe, resolved."""

    name: str
    model: ModelConfig
    seed: int = 0
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    driver: DriverConfig = field(default_factory=DriverConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    slime: SlimeConfig = field(default_factory=SlimeConfig)
    # Where each setting was written: dotted path -> "file:line". Kept by load.py for error messages; not a setting.
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False, metadata={"internal": True})

    def where(self, path: str) -> str:
        """Where the setting at ``path`` was written, for the start of an error message."""
        return self.sources.get(path, "the default")
