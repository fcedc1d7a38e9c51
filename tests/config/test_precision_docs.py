"""docs/precision.md says what the code does: its example resolves and its table is the table of operands."""

from __future__ import annotations

import re
from pathlib import Path

from recipe_files import MOE, plan_of

from minite.config.checks import CHOICES
from minite.config.operands import OPERANDS

TEXT = (Path(__file__).parents[2] / "docs" / "precision.md").read_text(encoding="utf-8")


def test_the_example_resolves(tmp_path):
    example = re.search(r"```yaml\n(precision:.*?)```", TEXT, re.DOTALL)
    plan = plan_of(tmp_path, MOE, example[1])
    assert plan["model.layers.1.mlp.experts.0.up_proj"].input == "nvfp4_row"
    assert plan["model.layers.0.mlp.experts.0.up_proj"].format == "bf16"


def test_the_table_is_the_table_of_operands():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| `")
    ]
    documented = {row[0].strip("`"): row[1:6] for row in rows if len(row) == 7}
    assert documented == {
        o.name: [
            "yes" if "weight" in o.roles else "",
            "yes" if "input" in o.roles else "",
            f"{o.bits:g}",
            str(o.k_multiple),
            str(o.rows_multiple),
        ]
        for o in OPERANDS.values()
    }


def test_every_word_is_mentioned():
    for key in ("kv_cache", "lm_head_dtype", "alignment"):
        words = ", ".join(f"`{word}`" for word in CHOICES[f"precision.{key}"])
        assert f"| `{key}` | {words} |" in TEXT
