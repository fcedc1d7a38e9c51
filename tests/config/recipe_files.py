"""Small recipes written to disk, and the one-line message of the error that using them raises."""

from __future__ import annotations

from pathlib import Path

import pytest

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
