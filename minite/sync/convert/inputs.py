"""Input scales of an NVFP4 checkpoint: kept where they are numbers, mended where no calibration token passed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from minite.sync.modelopt import INPUT_SCALE
from minite.sync.names import COMPRESSED_TENSORS, Scheme
from minite.sync.source import Source


def input_scales(source: Source, schemes: Mapping[str, Scheme]) -> tuple[dict[str, float], dict[str, str]]:
    """(module -> decode input scale, module -> what was wrong with it).

    An expert that saw no calibration token has no scale, or 0, NaN or Inf, and any number at all would be as right for
    it. But engines take the largest over the experts of a layer, so it is given the largest of its siblings, which
    changes nothing for them; and ``INPUT_SCALE`` where no sibling has one.
    """
    good: dict[str, float] = {}
    faults: dict[str, str] = {}
    for module, scheme in schemes.items():
        given = source.input_scale(module)
        decode = given if scheme is not COMPRESSED_TENSORS or not given else 1.0 / given
        if decode is not None and math.isfinite(decode) and decode > 0:
            good[module] = decode
        else:
            faults[module] = "missing" if given is None else str(given)
    largest: dict[str, float] = {}
    for module, value in good.items():
        largest[_role(module)] = max(largest.get(_role(module), 0.0), value)
    if not good:  # not a fault: weights only, or activations that are scaled as they come
        return {}, {}
    return good | {module: largest.get(_role(module), INPUT_SCALE) for module in faults}, faults


def _role(module: str) -> str:
    """Equal for the same projection of all experts of a layer."""
    stack, _, rest = module.partition(".experts.")
    return f"{stack}.experts.{rest.partition('.')[2]}" if rest else module
