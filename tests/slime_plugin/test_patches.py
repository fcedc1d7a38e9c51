"""A slime that has changed is found before anything of it is replaced."""

from __future__ import annotations

import pytest

from minite.errors import UserError
from slime_plugin import patches


def quantize_params(args, megatron_name, converted_named_params, quantization_config, transform_ue8m0=True):
    return converted_named_params


def renamed(args, name, converted_named_params, quantization_config, transform_ue8m0=True):
    return converted_named_params


class Updater:
    def __init__(self, args, model, weights_getter, *, model_name, quantization_config):
        self.quantization_config = quantization_config

    def update_weights(self):
        return self.quantization_config["quant_method"] in ["compressed-tensors"]


class Other(Updater):
    def update_weights(self):
        return self.quantization_config["quant_method"] == "compressed-tensors"


def test_signatures_and_sources_are_compared():
    patches.check_signature(quantize_params, patches.QUANTIZE_PARAMETERS)
    patches.check_updater(Updater)
    with pytest.raises(UserError, match=r"renamed has parameters \(args, name, .*as in slime 624b824a"):
        patches.check_signature(renamed, patches.QUANTIZE_PARAMETERS)
    with pytest.raises(UserError, match="Other.update_weights does not contain .*as in slime 624b824a"):
        patches.check_updater(Other)


def test_the_updater_goes_by_the_name_that_slime_reprocesses():
    config = {"quant_method": "modelopt", "ignore": ["a"]}
    made = patches.reprocessing(Updater)(1, 2, 3, model_name="m", quantization_config=config)
    assert made.update_weights() and made.quantization_config["ignore"] == ["a"]
    assert config["quant_method"] == "modelopt"
