"""Which requests an engine can run at all."""

from __future__ import annotations

from collections.abc import Container

from minite.config.schema import ModelConfig, SamplerConfig
from minite.errors import UserError
from minite.sampler.engine import Request


def check_request(request: Request, live: Container[str], model: ModelConfig, sampler: SamplerConfig) -> None:
    """Raises UserError for a request that is malformed, can never fit, or whose id is in ``live``."""
    params, prompt_len = request.params, len(request.prompt_tokens)
    reserved = prompt_len + params.max_new_tokens
    what = f"request {request.request_id!r}"
    if request.request_id in live:
        raise UserError(f"{what}: this id is already live; give each request an id of its own")
    if not request.prompt_tokens:
        raise UserError(f"{what}: empty prompt; give at least one token")
    if not 0 <= min(request.prompt_tokens) <= max(request.prompt_tokens) < model.vocab_size:
        raise UserError(f"{what}: a prompt token is outside the vocabulary, 0..{model.vocab_size - 1}")
    if params.max_new_tokens < 1:
        raise UserError(f"{what}: max_new_tokens is {params.max_new_tokens}; it must be at least 1")
    if params.temperature < 0 or params.top_k < 0 or not 0 < params.top_p <= 1:
        raise UserError(
            f"{what}: got temperature {params.temperature}, top_k {params.top_k}, top_p {params.top_p}; "
            "expected temperature >= 0, top_k >= 0 and 0 < top_p <= 1"
        )
    if reserved > model.max_seq_len:
        raise UserError(
            f"{what}: prompt {prompt_len} + max_new_tokens {params.max_new_tokens} is more than "
            f"model.max_seq_len {model.max_seq_len}; lower max_new_tokens"
        )
    if reserved > sampler.kv_tokens:
        raise UserError(
            f"{what}: prompt {prompt_len} + max_new_tokens {params.max_new_tokens} can never fit "
            f"sampler.kv_tokens {sampler.kv_tokens}; raise kv_tokens or lower max_new_tokens"
        )
