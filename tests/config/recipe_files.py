"""Small recipes written to disk, and the one-line message of the error that using them raises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from minite.config import PrecisionPlan, load_recipe, resolve_plan
from minite.errors import UserError

MOE = """\
model:
  kind: qwen3_moe
  num_layers: 3
  hidden_size: 64
  num_heads: 4
  num_kv_heads: 2
  head_dim: 16
  vocab_size: 32
  num_experts: 4
  experts_per_token: 2
  moe_intermediate_size: 32
  max_seq_len: 128
sampler:
  max_new_tokens: 16
"""  # 14 lines: what a test appends starts at line 15

DENSE = MOE.replace("qwen3_moe", "qwen3").replace(
    "  num_experts: 4\n  experts_per_token: 2\n  moe_intermediate_size: 32\n", "  intermediate_size: 96\n\n\n"
)

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
RUNNABLE = [path for path in SHIPPED if path.parent.name == "recipes"]


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message(function, *args) -> str:
    """The text of the UserError that the call raises; it must be one line."""
    with pytest.raises(UserError) as caught:
        function(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


W4A4 = """\
precision:
  formats:
    w4a4: {weight: nvfp4_1d, input: nvfp4_row}
    w4a16: {weight: nvfp4_1d}
"""  # 4 lines after the 14 of the model


def rules(*lines: str) -> str:
    """Two formats and the given rules, of which the first stands on line 20 after a model."""
    return W4A4 + "  rules:\n" + "".join(f"    - {line}\n" for line in lines)


def one_format(operands: str, *patterns: str) -> str:
    """One format of the given operands for the given patterns, BF16 for the rest."""
    chosen = "".join(f'{{match: "{pattern}", use: f}}, ' for pattern in patterns)
    return f'precision: {{formats: {{f: {{{operands}}}}}, rules: [{chosen}{{match: "**", use: bf16}}]}}\n'


def plan_of(folder: Path, model: str, precision: str = "", overrides: Sequence[str] = ()) -> PrecisionPlan:
    return resolve_plan(load_recipe(write(folder, model + precision), overrides))
