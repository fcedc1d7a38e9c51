"""The engine against transformers, and against itself with other precision."""

import pytest
import torch
from tiny_engine import DENSE, LLAMA, MOE, SIZES, config, engine, random_weights, requests

from minite.config import RunConfig
from minite.models.hf_config import write_hf_config

LOGPROB_HF = 1e-5  # FP32 on both sides, two layers; measured 1.6e-6 to 2.7e-6 over six models
FP8_KV_BAND = (0.01, 0.3)  # mean |change| of a log-prob [nats]; measured 0.04 to 0.09 over six models
BF16_LOGITS_BAND = (5e-4, 0.015)  # likewise; measured 0.0025 to 0.0033


@pytest.mark.parametrize("model", [MOE, DENSE, LLAMA, {**LLAMA, "tie_word_embeddings": True}])
def test_logprobs_equal_those_of_transformers(model):
    cfg = config(model, dtype="fp32")
    reference = hf_model(cfg)
    weights = random_weights(cfg)
    load_hf(reference, weights)
    done = engine(cfg).generate(requests(10, seed=1))
    for c in done:
        ids = torch.tensor([c.prompt_tokens + tuple(c.tokens)])
        with torch.no_grad():
            logprob_TV = reference(ids).logits[0].double().log_softmax(-1)
        at = len(c.prompt_tokens) - 1
        wanted = logprob_TV[at:-1].gather(-1, torch.tensor(c.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.logprobs, dtype=torch.float64), wanted, rtol=0, atol=LOGPROB_HF)


def hf_model(cfg: RunConfig) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    data = write_hf_config(cfg.model)
    hf_config = AutoConfig.for_model(data.pop("model_type"), **data)
    return AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval().float()


def load_hf(reference: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load HF-named weights; transformers 5 keeps the experts of a layer in two stacked parameters."""
    state = {k: v for k, v in weights.items() if ".experts." not in k}
    for layer in range(SIZES["num_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.gate_up_proj" in reference.state_dict():
            ids = range(MOE["num_experts"])
            state[f"{prefix}.gate_up_proj"] = torch.stack(
                [torch.cat([weights[f"{prefix}.{e}.{x}_proj.weight"] for x in ("gate", "up")]) for e in ids]
            )
            state[f"{prefix}.down_proj"] = torch.stack([weights[f"{prefix}.{e}.down_proj.weight"] for e in ids])
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected  # a tied head is the embedding


def mean_change(a, b) -> float:
    """Mean |log-prob difference| of the first sampled token, whose context is the same on both sides. [nats]"""
    pairs = [(x.logprobs[0], y.logprobs[0]) for x, y in zip(a, b, strict=True) if x.tokens[0] == y.tokens[0]]
    assert len(pairs) > 20
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def test_fp8_kv_cache_changes_logprobs_a_little():
    wanted = requests(60, seed=2, max_new_tokens=1)
    exact = engine(config(DENSE, alignment="off")).generate(wanted)
    cached = engine(config(DENSE, alignment="off", kv_cache="fp8")).generate(wanted)
    low, high = FP8_KV_BAND
    assert low < mean_change(exact, cached) < high


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fp8_kv_cache_holds_the_nearest_e4m3(dtype):
    cache = engine(config(DENSE, alignment="off", kv_cache="fp8", dtype=dtype)).cache
    assert {t.dtype for t in (*cache.k, *cache.v)} == {torch.float8_e4m3fn}
    x_THD = 3 * torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0)).to(cache.dtype)
    read = cache.read(cache.stored(x_THD))
    assert read.dtype == cache.dtype
    assert torch.equal(read, x_THD.to(torch.float8_e4m3fn).to(cache.dtype))


def test_fp8_kv_cache_is_the_same_for_prefill_and_decode():
    """A prefill attends to what it stored: continuing a request equals prefilling what it had generated."""
    e = engine(config(MOE, alignment="off", kv_cache="fp8", dtype="fp32"))
    r = requests(1, seed=3, max_new_tokens=6, temperature=0.0)[0]
    whole = e.generate([r])[0]
    longer = type(r)("longer", r.prompt_tokens + tuple(whole.tokens[:5]), type(r.params)(1, temperature=0.0))
    again = e.generate([longer])[0]
    assert again.tokens == whole.tokens[5:]
    assert again.logprobs[0] == pytest.approx(whole.logprobs[5], abs=1e-4)  # FP32 sums, and an E4M3 code may flip


def test_bf16_lm_head_rounds_the_logits():
    wanted = requests(30, seed=4, max_new_tokens=1)
    wide = engine(config(DENSE, alignment="off")).generate(wanted)
    rounded = engine(config(DENSE, alignment="off", lm_head_dtype="bf16")).generate(wanted)
    low, high = BF16_LOGITS_BAND
    assert low < mean_change(wide, rounded) < high


def test_tied_embeddings():
    cfg = config({**DENSE, "tie_word_embeddings": True})
    e = engine(cfg)
    assert e.model.lm_head is e.model.embedding and "lm_head.weight" not in e.model.weights.views
    assert len(e.generate(requests(3))) == 3
