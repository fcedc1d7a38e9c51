"""Every key that losses and diagnostics emit, and every key the report reads, stands in docs/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from minite.config.schema import AlgoConfig, CorrectionConfig
from minite.diagnostics.charts import CHARTS, SUMMARY, TIME_TOTAL
from minite.diagnostics.gap import gap_metrics, gap_summary
from minite.losses.correction import KINDS, correct
from minite.losses.grpo import grpo_loss, mean_metrics

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def _documented(key: str) -> bool:
    first_cells = [line.split("|")[1] for line in DOC.read_text().splitlines() if line.startswith("| `")]
    patterns = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    return any(re.fullmatch(re.sub(r"<\w+>", r"[a-z0-9]+", re.escape(p)), key) for p in patterns)


@pytest.mark.parametrize("kind", KINDS)
def test_emitted_keys(kind):
    ones = torch.ones(9, dtype=torch.float64)
    mask = ones.bool()
    corrected = correct(CorrectionConfig(kind=kind), ones, ones, ones, mask, mask.long(), None)
    loss = grpo_loss(ones, ones, ones, mask, None, 9, AlgoConfig(), ones, ones)
    keys = [*corrected.metrics, *mean_metrics(loss.metrics), *gap_metrics(gap_summary(ones, ones, ones, mask))]
    assert [key for key in keys if not _documented(key)] == []


def test_keys_of_the_report():
    keys = [curve.key for chart in CHARTS for curve in chart.curves] + [key for key, *_ in SUMMARY] + [TIME_TOTAL]
    assert [key for key in keys if not _documented(key)] == []


def test_the_table_can_say_no():
    assert not _documented("gap/unheard_of") and not _documented("triage/tail_nonsense")
