"""The report of what still holds memory, tested on CPU tensors with known holders."""

from types import SimpleNamespace

import torch
from engine_checks import held
from torch._subclasses.fake_tensor import FakeTensorMode


class Keeper:
    def __init__(self, tensor):
        self.weight = tensor


class Shelf:
    def __init__(self, tensors):
        self.tensors = tensors


SIZE = 1 << 26  # larger than anything else in this process


def test_the_largest_storage_comes_first_with_shape_dtype_and_holder():
    keeper = Keeper(torch.empty(SIZE // 64, 64, dtype=torch.uint8))
    view = keeper.weight[:2]  # it has the same storage, which is counted once
    rows = held.largest("cpu")
    assert (rows[0]["mib"], rows[0]["dtype"]) == (64.0, "torch.uint8")
    assert rows[0]["shape"] in ([SIZE // 64, 64], list(view.shape))
    assert sum(row["mib"] == 64.0 for row in rows) == 1
    assert len(rows) <= held.LARGEST
    assert [row["mib"] for row in rows] == sorted((row["mib"] for row in rows), reverse=True)


def test_tensors_that_the_compiler_traced_have_no_memory():
    with FakeTensorMode():
        traced = torch.empty(SIZE * 2, dtype=torch.uint8)
    sizes = [row["mib"] for row in held.largest("cpu")]
    assert traced.numel() / held.MIB == 128.0
    assert 128.0 not in sizes


def test_holders_are_named_by_owner_attribute_and_container():
    keeper = Keeper(torch.ones(3))
    shelf = Shelf([keeper.weight])
    names = " ".join(held.holders(keeper.weight, []))
    assert "Keeper" in names
    assert "Shelf" in names or "[list]" in names
    assert shelf.tensors[0] is keeper.weight


def test_objects_are_counted_by_type_and_holder():
    kept = SimpleNamespace(engine=Keeper(None), other=Keeper(None))
    found = held.alive(("Keeper", "NoSuchType"))
    assert list(found) == ["Keeper"]
    assert found["Keeper"]["count"] == 2
    assert "SimpleNamespace" in " ".join(found["Keeper"]["held_by"])
    assert kept.engine is not kept.other


def test_pools_add_up_by_their_id():
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 2 * held.MIB, "allocated_size": held.MIB},
        {"segment_pool_id": (0, 1), "total_size": 20 * held.MIB, "allocated_size": 0},
        {"segment_pool_id": (0, 1), "total_size": 4 * held.MIB, "allocated_size": held.MIB},
    ]
    assert held.pools(segments) == {
        "(0, 0)": {"reserved": 2.0, "allocated": 1.0},
        "(0, 1)": {"reserved": 24.0, "allocated": 1.0},
    }
