"""A bucket as one flat tensor and back; drawing numbers and page tables in torch as elsewhere."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minite.sampler.embedded.sampling import uniform as numpy_uniform
from minite.sampler.sglang.cpu_stand_ins import assign_req_to_token_pool_cpu
from minite.sampler.sglang.draw import uniform
from minite.sync.flat import flatten, unflatten
from minite.sync.verify import compare

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64)
shapes = st.lists(st.integers(0, 5), max_size=3)


@settings(deadline=None, derandomize=True)  # the first example may wait for a busy machine
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
def test_a_bucket_survives_flattening(tensors):
    bucket = {f"t{i}": (torch.randn(shape) * 8).to(dtype) for i, (shape, dtype) in enumerate(tensors)}
    returned = unflatten(flatten(bucket))
    assert compare(bucket, returned) is None


def test_a_transposed_tensor_keeps_its_values():
    bucket = {"t": torch.arange(12.0).view(3, 4).t()}
    assert compare(bucket, unflatten(flatten(bucket))) is None


def test_what_passes_between_processes_is_two_storages():
    bucket = {f"t{i}": torch.randn(3) for i in range(100)}
    assert [tensor.dtype for tensor in flatten(bucket).values()] == [torch.uint8, torch.uint8]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_uniforms_are_those_of_the_built_in_sampler(pairs):
    seeds, positions = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    got = uniform(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions.view(np.int64)))
    assert torch.equal(got, torch.from_numpy(numpy_uniform(seeds, positions)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_new_slots_go_to_each_requests_row(dtype):
    pool = torch.full((4, 8), -1, dtype=torch.int32)
    request, start, end = torch.tensor([2, 0, 3]), torch.tensor([0, 3, 5]), torch.tensor([2, 3, 8])
    slots = torch.tensor([70, 71, 80, 81, 82, 999], dtype=dtype)  # a last one that belongs to nobody
    assign_req_to_token_pool_cpu(request, pool, start, end, slots, 8)
    expected = torch.full((4, 8), -1, dtype=torch.int32)
    expected[2, 0:2], expected[3, 5:8] = torch.tensor([70, 71]), torch.tensor([80, 81, 82])
    assert torch.equal(pool, expected)
