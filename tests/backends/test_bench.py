"""The forward bench measures what it says. How fast is a matter of the bench itself, not of a test."""

from __future__ import annotations

from minite.backends.bench import BOUND, Row, measure, table


def test_measure_times_every_part_of_a_small_linear():
    row = measure((8, 16, 32), repeats=2)
    assert row.mnk == (8, 16, 32)
    assert min(row.torch_bf16, row.backend_bf16, row.quantize, row.w4a4) > 0


def test_the_table_states_the_worst_ratio_and_holds_it_against_the_bound():
    fine = Row((1024, 512, 512), torch_bf16=2.0, backend_bf16=1.0, quantize=0.5, w4a4=3.0)
    assert fine.ratio == 1.5 and fine.ratio_backend == 3.0
    assert "worst W4A4 / BF16 torch: 1.50, within" in table([fine])
    slow = Row((1024, 512, 512), torch_bf16=2.0, backend_bf16=1.0, quantize=0.5, w4a4=2.0 * BOUND + 1)
    assert "ABOVE" in table([fine, slow])
