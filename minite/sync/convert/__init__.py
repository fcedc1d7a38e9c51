"""Checkpoint directories converted between BF16, NVFP4 and block FP8. See ../README.md."""

from minite.sync.convert.run import FILE_BYTES, Report, convert
from minite.sync.targets import TARGETS

__all__ = ["FILE_BYTES", "TARGETS", "Report", "convert"]
