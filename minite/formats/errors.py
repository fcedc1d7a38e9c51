"""Errors of the numeric formats. Both are also ValueErrors, so that plain library use reads naturally."""

from __future__ import annotations

from minite.errors import UserError


class FormatError(UserError, ValueError):
    """A shape, dtype or option that the format cannot take."""


class NonFiniteError(FormatError):
    """A tensor to quantize holds NaN or Inf. The message names the tensor and the first bad coordinate."""
