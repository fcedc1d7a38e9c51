"""The doctor passes the reference backend and catches backends that are slightly wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minite.backends.doctor import check_backend, examine
from minite.backends.reference import ReferenceBackend
from minite.formats import QTensor


def faults(backend: Any) -> list[str]:
    return [what for what, fault in check_backend(backend, "cpu") if fault is not None]


@pytest.mark.parametrize("strict", [False, True])
def test_reference_passes_every_check(strict: bool) -> None:
    checks = list(check_backend(ReferenceBackend(strict=strict), "cpu"))
    assert len(checks) == 3 + strict
    assert [fault for _, fault in checks if fault] == []


def test_report_names_versions_devices_and_backends() -> None:
    text, healthy = examine()
    assert healthy and text.endswith("all checks passed")
    for part in ("miniTE ", f"torch           {torch.__version__}", "cpu: ", "reference (reference): can run"):
        assert part in text


class Spoiled(ReferenceBackend):
    """The reference with one thing changed."""

    def __init__(self, change: Callable[[QTensor], QTensor] = lambda q: q, factor: float = 1.0, strict: bool = False):
        super().__init__(strict=strict)
        self._change, self._factor = change, factor

    def quantize(self, x_MK: torch.Tensor, how: str, **options: Any) -> Any:
        return self._change(super().quantize(x_MK, how, **options))

    def gemm(self, a_MK: Any, b_NK: object, out_dtype: torch.dtype) -> torch.Tensor:
        out_MN = super().gemm(a_MK, b_NK, out_dtype) * self._factor
        return out_MN + 1e-12 * out_MN.mean() if self.strict else out_MN


def flip_code(q: QTensor) -> QTensor:
    codes = q.codes.clone()
    codes[-1, -1] ^= 1
    return replace(q, codes=codes)


def test_one_wrong_code_is_caught() -> None:
    assert faults(Spoiled(flip_code))[:2] == [
        "NVFP4 codes of known values",
        "quantizer equals the reference, byte for byte",
    ]


def test_an_amax_off_by_one_ulp_is_caught() -> None:
    def nudge(q: QTensor) -> QTensor:
        return replace(q, amax=torch.nextafter(q.amax, torch.tensor(torch.inf)))

    assert faults(Spoiled(nudge)) == ["quantizer equals the reference, byte for byte"]


@pytest.mark.parametrize("factor", [1 + 1e-3, float("nan"), 0.0])
def test_a_wrong_product_is_caught(factor: float) -> None:
    assert faults(Spoiled(factor=factor)) == ["GEMM within the bound of its summation"]


def test_a_result_that_depends_on_its_batch_is_caught() -> None:
    assert "a row's result does not depend on its batch" in faults(Spoiled(strict=True))
