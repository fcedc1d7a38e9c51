"""sync.transport: nothing is lost, buckets keep their bound, the manifest tells what was sent."""

import pytest
import torch
from small_model import recipe, shapes, weights

from minite.config import resolve_plan
from minite.sync.errors import SyncError
from minite.sync.export import FormatQuantizer, pack, unquantized
from minite.sync.transport import MANIFEST, UNQUANTIZED, buckets, from_wire, package, read_manifest, to_wire
from minite.sync.verify import compare, raw_bytes


def groups(count: int, seed: int = 0) -> list[tuple[str, dict[str, torch.Tensor]]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (
            f"m{i}",
            {
                f"m{i}.weight": torch.randint(0, 256, (i + 1, 8), dtype=torch.uint8, generator=g),
                f"m{i}.weight_scale": torch.rand(i + 1, 1, generator=g).to(torch.float8_e4m3fn),
                f"m{i}.weight_amax": torch.rand((), generator=g),
            },
        )
        for i in range(count)
    ]


def flat(named) -> dict[str, torch.Tensor]:
    return {k: v for _, tensors in named for k, v in tensors.items()}


@pytest.mark.parametrize("max_bytes", [1, 50, 10_000])
def test_round_trip_and_bound(max_bytes):
    sent = list(buckets(iter(groups(9)), max_bytes))
    manifest = read_manifest(sent.pop()[MANIFEST])
    received: dict[str, torch.Tensor] = {}
    for bucket in sent:
        assert len(bucket) == 1 or sum(raw_bytes(t).numel() for t in bucket.values()) <= max_bytes
        assert not received.keys() & from_wire(bucket).keys()
        received |= from_wire(bucket)
    assert compare(received, flat(groups(9))) is None
    assert manifest.keys() == received.keys()


def test_wire_holds_no_fp8_and_survives_pickle(tmp_path):
    tensors = {"s": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn), "w": torch.ones(2, dtype=torch.bfloat16)}
    wire = to_wire(tensors)
    assert wire.keys() == {"s|float8_e4m3fn", "w"} and wire["s|float8_e4m3fn"].dtype == torch.uint8
    torch.save(wire, tmp_path / "wire")
    assert compare(from_wire(torch.load(tmp_path / "wire")), tensors) is None
    assert compare(from_wire(tensors), tensors) is None  # untagged names pass unchanged


def test_unknown_tag_and_damaged_manifest_are_named():
    with pytest.raises(SyncError, match="x: unknown dtype tag 'int3'"):
        from_wire({"x|int3": torch.zeros(1, dtype=torch.uint8)})
    with pytest.raises(SyncError, match="manifest of the weights is damaged"):
        read_manifest(torch.frombuffer(bytearray(b"{"), dtype=torch.uint8))


def test_package_version_follows_content_not_bucket_size():
    _, small = package(groups(5), 3, "plan", 40)
    _, large = package(groups(5), 3, "plan")
    _, other = package(groups(5, seed=1), 3, "plan")
    assert small == large and small.step == 3 and small.plan_digest == "plan"
    assert other.weight_digest != small.weight_digest


def test_plain_tensors_come_with_the_digest_of_what_they_become():
    cfg = recipe("w4a4")
    plan, named = resolve_plan(cfg), weights(cfg)
    packed, version = package(pack(plan, named.items(), FormatQuantizer()), 7, plan.digest)
    groups, digest = unquantized(plan, named.items(), FormatQuantizer())
    plain, same = package(groups, 7, plan.digest, 4000, digest)
    assert same == version and torch.equal(plain.pop()[MANIFEST], packed[-1][MANIFEST])
    assert len(plain) > 3 and all(UNQUANTIZED in bucket for bucket in plain)
    sent = {name: t for bucket in plain for name, t in bucket.items() if name != UNQUANTIZED}
    assert compare(sent, named) is None
    groups, digest = unquantized(plan, list(named.items())[:-3], FormatQuantizer(), shapes=shapes(cfg))
    with pytest.raises(SyncError, match="missing from the exported weights"):
        package(groups, 7, plan.digest, quantized=digest)


def test_a_tensor_packed_twice_is_refused():
    with pytest.raises(SyncError, match="m0.weight: arrived twice"):
        package(groups(1) + groups(1), 0, "plan")
