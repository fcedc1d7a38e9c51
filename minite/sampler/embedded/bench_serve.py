"""A decode step of Qwen3-30B-A3B with random weights on one GPU, W4A4 beside BF16: `minite bench serve`.

One token for each sequence of a batch over 1,024 tokens of context: embedding, 48 layers, LM head, arg max. A step is
replayed as a CUDA graph. The engine itself launches its kernels one by one yet, so this is what it could reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.registry import get_backend
from minite.backends.triton.timing import Run, medians
from minite.config import RunConfig, load_recipe, resolve_plan
from minite.config.load import shipped
from minite.sampler.embedded.kv_cache import Decode, KVCache
from minite.sampler.embedded.model import Model

RECIPES = {"BF16": "qwen3_30b_a3b_bf16_grpo.yaml", "W4A4": "qwen3_30b_a3b_w4a4_grpo.yaml"}
BATCHES, CONTEXT = (1, 16, 64, 256), 1024


def random_model(config: RunConfig, device: torch.device) -> Model:
    """The recipe's model with random weights, made on the device in the form in which a sampler is sent them."""
    backend = get_backend("auto", device=device, strict=False)
    model = Model(resolve_plan(config), config.model, backend, device)
    linears = model.weights.linears
    in_linears = {name for linear in linears for name in linear.views}
    for name, tensor in model.weights.views.items():
        if name not in in_linears:
            _fill(tensor)
    for linear in linears:
        for buffer in linear.buffers.values():
            _fill(buffer)
    model.prepare()
    return model


def _fill(tensor: Tensor) -> None:
    if tensor.dtype == torch.uint8:
        tensor.random_(0, 256)
    elif tensor.dtype == torch.float8_e4m3fn:  # block scales from 1 to 1.875
        tensor.view(torch.uint8).random_(0x38, 0x40)
    elif tensor.dtype == torch.float32:  # outer amax, so that values are about 0.03
        tensor.fill_(30.0)
    elif tensor.ndim == 1:  # norms
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=0.03)


def measure(batches: tuple[int, ...] = BATCHES, context: int = CONTEXT) -> list[dict[str, float | str]]:
    """Times of a step by batch, the bytes of weights held, and tokens per second."""
    configs = {name: load_recipe(shipped(recipe)) for name, recipe in RECIPES.items()}
    models, held = {}, {}
    for name, config in configs.items():
        before = torch.cuda.memory_allocated()
        models[name] = random_model(config, torch.device("cuda"))
        held[name] = (torch.cuda.memory_allocated() - before) / 1e9
    shape = configs["BF16"].model
    cache = KVCache(shape, "bf16", max(batches) * context, torch.bfloat16, torch.device("cuda"))
    for pool in (*cache.k, *cache.v):
        pool.normal_()
    rows: list[dict[str, float | str]] = []
    for batch in batches:
        length_B = torch.full((batch,), context, device="cuda")
        slot_B = torch.arange(1, batch + 1, device="cuda") * context - 1
        token_B = torch.randint(0, shape.vocab_size, (batch,), device="cuda")

        def step(model: Model, token_B: Tensor = token_B, slot_B: Tensor = slot_B, length_B: Tensor = length_B) -> Run:
            attend = Decode(cache, slot_B, slot_B, length_B, shape.head_dim**-0.5, False, model.fused)
            return lambda: model.forward(token_B, length_B - 1, attend, None)[0].argmax(-1)

        times = medians({name: step(model) for name, model in models.items()}, repeats=8)
        rows += [
            {"batch": batch, "run": name, "step ms": ms, "tokens/s": 1e3 * batch / ms, "speedup": times["BF16"] / ms,
             "weights GB": held[name]} for name, ms in times.items()
        ]  # fmt: skip
    return rows
