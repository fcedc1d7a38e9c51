"""The forward bench measures what it says. How fast is a matter of the bench itself, not of a test."""

from __future__ import annotations

import pytest

from minite.backends import bench_quantize
from minite.backends.bench import BOUND, Row, measure, table


def test_measure_times_every_part_of_a_small_linear():
    row = measure((8, 16, 32), repeats=2)
    assert (row.mnk, row.backend) == ((8, 16, 32), "cpu")
    assert min(row.torch_bf16, row.backend_bf16, row.quantize, row.w4a4) > 0


def test_the_table_states_the_worst_ratio_and_holds_it_against_the_bound():
    fine = Row((1024, 512, 512), "cpu", torch_bf16=2.0, backend_bf16=1.0, quantize=0.5, w4a4=3.0)
    assert fine.ratio == 1.5 and fine.ratio_backend == 3.0
    assert "worst W4A4 / BF16 torch: 1.50, within" in table([fine])
    slow = Row((1024, 512, 512), "cpu", torch_bf16=2.0, backend_bf16=1.0, quantize=0.5, w4a4=2.0 * BOUND + 1)
    assert "ABOVE" in table([fine, slow])


def test_every_operation_of_every_backend_is_timed_beside_the_copy():
    rates = bench_quantize.measure((32, 64), turns=2)
    assert (rates[0].operation, rates[0].of_copy, rates[0].copy_time) == ("copy", 1, 1)
    operations = [[r.operation for r in rates if r.backend == name] for name in ("cpu", "reference")]
    assert operations[0] == operations[1] and len(rates) == 1 + 2 * 7
    assert {f"quantize {how}" for how in bench_quantize.FORMATS} < set(operations[0])
    copied, codes = rates[0].gb_per_s * rates[0].ms, next(r for r in rates if r.operation == "quantize nvfp4_1d")
    assert codes.gb_per_s * codes.ms == pytest.approx(copied * (16 + 4.5) / 32, rel=1e-2)  # bits by bits; an amax more


def test_the_worst_1d_quantizer_of_the_best_backend_is_held_against_the_bound():
    def rate(operation, backend, of_copy):
        return bench_quantize.Rate(operation, backend, 1.0, 1.0, of_copy, of_copy)

    rates = [rate("copy", "torch", 1), *(rate(case, "cpu", 0.3) for case in bench_quantize.BOUND_CASES)]
    rates += [rate("quantize nvfp4_1d", "reference", 0.02)]
    assert "30.0% of the copy (cpu), within" in bench_quantize.table(rates)
    rates[2] = rate("quantize nvfp4_row", "cpu", 0.2)
    assert "20.0% of the copy (cpu), BELOW" in bench_quantize.table(rates)
