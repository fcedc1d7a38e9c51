"""sync.verify: a digest sees every byte, every name, and nothing else."""

import pytest
import torch

from minite.sync.errors import SyncError
from minite.sync.verify import Digest, combine, compare, first_difference


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "a.weight": torch.randint(0, 256, (6, 8), dtype=torch.uint8, generator=g),
        "a.weight_scale": torch.rand(6, 4, generator=g).to(torch.float8_e4m3fn),
        "a.weight_amax": torch.tensor(3.5),
        "norm.weight": torch.randn(7, generator=g).bfloat16(),
        "empty": torch.empty(0, 3),
    }


def digest(named: dict[str, torch.Tensor]) -> Digest:
    d = Digest()
    for name, tensor in named.items():
        d.update(name, tensor)
    return d


def test_order_of_arrival_and_strides_do_not_matter():
    named = tensors()
    named["t"] = torch.arange(12.0).reshape(3, 4).t()
    shuffled = dict(reversed(named.items()))
    shuffled["t"] = named["t"].contiguous()
    assert digest(named).hexdigest() == digest(shuffled).hexdigest() == combine(digest(named).parts)


@pytest.mark.parametrize("name", ["a.weight", "a.weight_scale", "a.weight_amax", "norm.weight"])
def test_every_byte_matters(name):
    whole = digest(tensors()).hexdigest()
    size = tensors()[name].numel() * tensors()[name].element_size()
    for byte in range(size):
        named = tensors()
        named[name].reshape(-1).view(torch.uint8)[byte] ^= 1
        assert digest(named).hexdigest() != whole, byte


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"b.weight" if k == "a.weight" else k: v for k, v in t.items()},  # name
        lambda t: t | {"a.weight": t["a.weight"].reshape(8, 6)},  # shape
        lambda t: t | {"a.weight_scale": t["a.weight_scale"].view(torch.uint8)},  # dtype
        lambda t: t | {"a.weight_amax": t["a.weight_amax"].reshape(1)},  # rank
        lambda t: t | {"a.weight": t["a.weight"].flip(0)},  # order of rows
        lambda t: {k: v for k, v in t.items() if k != "empty"},  # a tensor without bytes counts too
    ],
)
def test_names_shapes_and_dtypes_matter(change):
    assert digest(change(tensors())).hexdigest() != digest(tensors()).hexdigest()


def test_hashing_side_by_side_gives_the_same_parts():
    tensors = {f"t{i}": torch.randn(i % 7, 1000 + i) for i in range(50)}
    one, many = Digest(), Digest()
    for name, tensor in tensors.items():
        one.update(name, tensor)
    many.update_many(tensors)
    assert one.parts == many.parts and one.hexdigest() == many.hexdigest()
    with pytest.raises(SyncError, match="t3: arrived twice"):
        many.update_many({"t3": tensors["t3"]})


def test_a_name_sent_twice_is_refused():
    d = digest(tensors())
    with pytest.raises(SyncError, match="norm.weight: arrived twice"):
        d.update("norm.weight", torch.zeros(7))


def test_first_difference_names_the_tensor():
    sent, held = digest(tensors()).parts, digest(tensors()).parts
    assert first_difference(sent, held) is None
    assert first_difference(sent, {k: v for k, v in held.items() if k != "a.weight"}).startswith("a.weight: sent but")
    assert first_difference(sent, held | {"b": "0"}).startswith("b: held but never sent")
    assert first_difference(sent, held | {"norm.weight": "0"}).startswith("norm.weight: held bytes differ")


def test_compare_gives_coordinate_and_values():
    a, b = tensors(), tensors()
    assert compare(a, b) is None
    b["norm.weight"][5] = 2.0
    assert "norm.weight: first differs at [5]" in compare(a, b) and "2.0" in compare(a, b)
    b["a.weight"][4, 3] += 1
    assert compare(a, b).startswith("a.weight: first differs at [4, 3]")
    b["a.weight_amax"] = torch.tensor(1.0)
    assert compare({"x": a["a.weight_amax"]}, {"x": b["a.weight_amax"]}) == "x: first differs at []: 3.5 against 1.0"


def test_compare_is_bitwise():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert compare({"x": nan}, {"x": nan.clone()}) is None
    assert compare({"x": zero}, {"x": -zero}) is not None
    assert "only in the second" in compare({}, {"x": zero})
    assert "float32 (1,) against float64 (1,)" in compare({"x": zero}, {"x": zero.double()})
