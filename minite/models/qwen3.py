"""Qwen3 dense: the common case with QK norm."""

from __future__ import annotations

from minite.models.family import ModelFamily


class Qwen3(ModelFamily):
    kind = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    qk_norm = True
    fixed = {**ModelFamily.fixed, "use_sliding_window": False}
