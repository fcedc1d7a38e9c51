"""What the backend native cannot take of a plan's shapes is said when the plan is made, in one line."""

from __future__ import annotations

import pytest
from recipe_files import DENSE, MOE, message, one_format, plan_of, write

from minite.backends.cutlass.checks import check_sizes
from minite.config import load_recipe
from minite.config.plan_checks import check_backend_shapes
from minite.errors import UserError
from minite.models import get_model

NATIVE = "precision.backend=native"
W4A4 = "weight: nvfp4_1d, input: nvfp4_row"


@pytest.mark.parametrize(
    ("model", "operands", "pattern", "overrides", "expected"),
    [
        (  # what dgrad sums over
            DENSE.replace("hidden_size: 64", "hidden_size: 48"), f"{W4A4}, dgrad: nvfp4", "**.down_proj", [],
            "module 'model.layers.0.mlp.down_proj' has N = 48, but 'dgrad: nvfp4' in the backend native needs a "
            "multiple of 32 on each rank; use precision.backend=triton, or another format for it",
        ),
        (  # q, k and v are one weight: 3 x 16 rows
            DENSE.replace("heads: 4", "heads: 1").replace("heads: 2", "heads: 1"), f"{W4A4}, dgrad: nvfp4",
            "**.self_attn.*", [],
            "fusion group 'model.layers.0.self_attn.qkv_proj' has N = 48, but 'dgrad: nvfp4'",
        ),
        (  # what the forward sums over
            DENSE.replace("hidden_size: 64", "hidden_size: 48"), W4A4, "**.mlp.*", [],
            "fusion group 'model.layers.0.mlp.gate_up_proj' has K = 48, but 'nvfp4_1d' in the backend native needs a "
            "multiple of 32",
        ),
        (  # 96 over two ranks is 48
            DENSE, W4A4, "**.down_proj", ["learner.tensor_parallel=2"],
            "module 'model.layers.0.mlp.down_proj' has K = 96 over 2 tensor-parallel ranks, but 'nvfp4_1d'",
        ),
        (  # rows of a BF16 result
            DENSE.replace("hidden_size: 64", "hidden_size: 100"), W4A4, "**.down_proj", [],
            "has N = 100, but 'nvfp4_1d' in the backend native needs a multiple of 8",
        ),
    ],
)  # fmt: skip
def test_shapes_that_native_refuses(tmp_path, model, operands, pattern, overrides, expected):
    precision = one_format(operands, pattern)
    text = message(plan_of, tmp_path, model, precision, [NATIVE, *overrides])
    assert expected in text and text.startswith(f"{tmp_path / 'r.yaml'}:15: rule 0 (match {pattern} -> f): "), text
    plan_of(tmp_path, model, precision, ["precision.backend=auto", *overrides])  # another backend takes it
    if overrides:
        plan_of(tmp_path, model, precision, [NATIVE])


def test_what_fits_is_left_alone(tmp_path):
    """One KV head of 16 columns: v alone has 16 rows, the group that dgrad sums over 96."""
    one_head = MOE.replace("num_kv_heads: 2", "num_kv_heads: 1")
    precision = one_format(f"{W4A4}, dgrad: nvfp4, wgrad: nvfp4", "**.self_attn.*", "**.mlp.experts.*.*")
    assert plan_of(tmp_path, one_head, precision, [NATIVE]).backend == "native"
    assert plan_of(tmp_path, DENSE, "", [NATIVE, "model.intermediate_size=20"])  # BF16 runs elsewhere


def test_auto_is_asked_again_with_the_backend_that_the_machine_got(tmp_path):
    odd = DENSE.replace("hidden_size: 64", "hidden_size: 48")
    path = write(tmp_path, odd + one_format(f"{W4A4}, dgrad: nvfp4", "**.down_proj"))
    config, plan, family = load_recipe(path), plan_of(tmp_path, odd, path.read_text()[len(odd) :]), get_model("qwen3")
    for other in ("triton", "cpu", "reference"):
        check_backend_shapes(config, plan, family, other)
    with pytest.raises(UserError, match="N = 48, but 'dgrad: nvfp4' in the backend native"):
        check_backend_shapes(config, plan, family, "native")


@pytest.mark.parametrize(("n", "k"), [(8, 32), (8, 48), (12, 32), (100, 64)])
def test_the_plan_refuses_what_the_kernel_would(tmp_path, n, k):
    """dgrad of down_proj is a product over N; the forward one over K."""
    model = DENSE.replace("hidden_size: 64", f"hidden_size: {n}").replace(
        "intermediate_size: 96", f"intermediate_size: {k}"
    )
    refused = False
    try:
        check_sizes("product", 1, n, k)
    except UserError:
        refused = True
    if refused:
        message(plan_of, tmp_path, model, one_format(W4A4, "**.down_proj"), [NATIVE])
    else:
        plan_of(tmp_path, model, one_format(W4A4, "**.down_proj"), [NATIVE])
