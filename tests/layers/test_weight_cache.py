"""When quantized weights are made anew, and when they are not."""

import exact
import pytest
import torch
from torch import nn

from minite.backends.registry import get_backend
from minite.layers.grouped_linear import QuantGroupedLinear
from minite.layers.linear import QuantLinear
from minite.layers.matmul import LinearSpec
from minite.layers.weight_cache import PreparedWeight, WeightCache

W4A4 = LinearSpec("nvfp4_1d", "nvfp4_row", "bf16", "bf16")


class Counter:
    """Asks a cache for weights and says whether it had to make them."""

    def __init__(self):
        self.cache, self.made = WeightCache(), 0

    def made_for(self, *weights):
        before = self.made
        self.cache.get(weights, self.make)
        return self.made > before

    def make(self):
        self.made += 1
        return PreparedWeight(torch.zeros(1), None)


def test_made_once_for_an_unchanged_weight():
    counter, w = Counter(), nn.Parameter(torch.ones(2, 2))
    assert [counter.made_for(w) for _ in range(3)] == [True, False, False]
    w.sum().backward()  # a gradient is no change of the weight
    assert not counter.made_for(w)


@pytest.mark.parametrize("foreach", [False, True])
def test_made_again_after_an_optimizer_step(foreach):
    counter, w = Counter(), nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([w], foreach=foreach)
    counter.made_for(w)
    w.sum().backward()
    optimizer.step()
    assert counter.made_for(w)


def test_made_again_after_copy_and_after_re_pointing():
    counter, w = Counter(), nn.Parameter(torch.ones(2, 2))
    counter.made_for(w)
    with torch.no_grad():
        w.copy_(torch.zeros(2, 2))
    assert counter.made_for(w)
    w.data = torch.zeros(2, 2)
    assert counter.made_for(w)
    assert not counter.made_for(w)


def test_made_again_for_another_tensor_of_equal_content():
    counter, w = Counter(), nn.Parameter(torch.ones(2, 2))
    counter.made_for(w)
    assert counter.made_for(nn.Parameter(w.data))


def test_one_changed_expert_is_enough():
    counter, weights = Counter(), [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    assert counter.made_for(*weights) and not counter.made_for(*weights)
    with torch.no_grad():
        weights[1].add_(1)
    assert counter.made_for(*weights) and counter.made_for(*weights[:2])


def test_failure_to_make_leaves_no_entry():
    counter, w = Counter(), nn.Parameter(torch.ones(2, 2))
    counter.made_for(w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(ZeroDivisionError):
        counter.cache.get([w], lambda: 1 / 0)
    assert counter.made_for(w)


@pytest.mark.parametrize("kind", ["dense", "stacked", "list"])
def test_writes_that_torch_does_not_count_need_invalidation(kind):
    backend = get_backend("reference", device="cpu", strict=False)
    if kind == "dense":
        module, shape = QuantLinear(nn.Parameter(exact.randn(16, 32)), W4A4, backend), (1, 32)
        call = module
    else:
        stacked = exact.randn(2, 16, 32)
        weights = nn.Parameter(stacked) if kind == "stacked" else [nn.Parameter(w.clone()) for w in stacked]
        module, shape = QuantGroupedLinear(weights, W4A4, backend), (3, 32)

        def call(x):
            return module(x, torch.tensor([1, 2]))

    x = exact.randn(*shape, seed=1)
    before = call(x)
    for parameter in module.parameters():
        parameter.data.mul_(-1)
    assert torch.equal(call(x), before)  # the documented limit: this is why learners invalidate
    module.cache.invalidate()
    assert torch.equal(call(x), -before)
