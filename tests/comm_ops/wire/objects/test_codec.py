"""Objects are written and read without pickle: what was told comes back, and a stranger's bytes run nothing."""

from __future__ import annotations

import json
import math
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.wire.objects import codec
from hetu_fx.comm_ops.wire.objects.codec import MOST_DEPTH, decode, write
from hetu_fx.comm_ops.wire.peers.system import SharedPlace
from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.errors import CommError, HetuFxError, StateError
from hetu_fx.graph.containers import Withheld, WithheldNumber
from hetu_fx.graph.graph import LeafKind
from hetu_fx.plans.plan import Pipeline, Plan, Stage


def again(value: Any) -> Any:
    return decode(write(value), "a test")


def message(told: Any, *kinds: Any, blobs: bytes = b"") -> bytes:
    """Return bytes as a stranger may make them up."""
    text = json.dumps([list(kinds), told]).encode()
    return len(text).to_bytes(8) + text + blobs


def bits(number: float) -> bytes:
    return struct.pack(">d", number)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "text \ud800 \0",
        b"bytes \xff",
        -(1 << 9_000),
        (1 << 63) - 1,
        (),
        ((1, [2, (3,)]), {4}, frozenset({(5, 6)})),
        {1: "a", "1": "b", None: (), (1, 2): {}, 2.5: True},
        1 - 2j,
        torch.bfloat16,
        torch.device("cuda", 3),
        Path("/a/b"),
        LeafKind.COUNT,
        SharedPlace(3, 4, b"word"),
        Plan((Pipeline((Stage((0, 2), ratios=(3, 2)), Stage((1,))), micro_batches=3),), zero=0, name="x"),
        [dict, OrderedDict, tuple, Plan],
        Withheld("cache", "Cache", frozenset({"get"})),
        WithheldNumber("count", "why"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = again(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)  # an order, and 1 where True is equal


@pytest.mark.parametrize("number", [-0.0, math.inf, -math.inf, math.nan, 5e-324, 0.1, 1.7976931348623157e308])
def test_numbers_keep_every_bit(number: float) -> None:
    assert bits(again(number)) == bits(number)
    assert bits(again(complex(0, number)).imag) == bits(number)


def test_of_nan_the_payload_is_kept() -> None:
    pattern = bytes.fromhex("fff8000000000123")
    assert bits(again(struct.unpack(">d", pattern)[0])) == pattern


@pytest.mark.parametrize(
    "number", [np.float64(0.1), np.float32(0.1), np.int64(-5), np.bool_(True), np.uint64(2**64 - 1)]
)
def test_numbers_of_numpy_come_back_as_those_of_python(number: Any) -> None:
    assert (again(number), type(again(number))) == (number, type(number.item()))


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3, dtype=torch.int8),
        torch.empty(0, 4, dtype=torch.float16),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
    ],
    ids=str,
)
def test_tensors_come_back_with_their_values(x: torch.Tensor) -> None:
    found = again({"x": x})["x"]
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert torch.equal(found.nan_to_num(), x.detach().nan_to_num())
    found.zero_()  # its memory is its own
    assert not torch.equal(x, found) or not x.any()


def test_an_object_in_several_places_is_told_once_and_is_one_object_again() -> None:
    factor = FactorClass(1, 64, False, "s12")
    first, others = again((factor, [factor] * 100))
    assert (first, first.text) == (factor, "s12")
    assert all(other is first for other in others)
    assert len(write([factor] * 100)) < 1000


def test_what_the_reader_has_is_told_by_name() -> None:
    mine, theirs = object(), object()
    data = write({"it": [mine]}, {id(mine): "the thing"})
    assert decode(data, "a test", {"the thing": theirs})["it"][0] is theirs


class Mutable:
    pass


@dataclass(frozen=True)
class Foreign:
    x: int


class Pair(NamedTuple):
    x: int


def local() -> Any:
    class Local(Enum):
        A = 1

    return Local


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": [1, {"b": Mutable()}]}, r"Mutable .* at \['a'\]\[1\]\['b'\]"),
        ({Foreign(1): 2}, r"Foreign .* at \[.*Foreign"),
        ((Pair(1),), r"Pair .* at \[0\]"),
        (Plan((Pipeline((Stage((0,)),)),), name=lambda: "x"), r"function .* at \.name"),  # type: ignore[arg-type]
        (Counter("ab"), "collections.Counter"),
        (defaultdict(int), "collections.defaultdict"),
        (np.ones(2), "numpy.ndarray"),
        (np.longdouble(1), "numpy.longdouble"),
        ([print], "builtins.builtin_function_or_method"),
        ([int], r"class builtins:int.* no container.* at \[0\]"),
        (local().A, "Local"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (torch.ones(1).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), "on meta"),
        (StateError("x"), "hetu_fx.errors.StateError"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_has_no_kind_is_refused_with_its_type_and_its_place(value: Any, what: str) -> None:
    with pytest.raises(StateError, match=rf"(?s){what}.*\nhint: numbers, text"):
        write(value)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(StateError, match=f"nested deeper than {MOST_DEPTH} times"):
        write(value)


def test_more_bytes_than_others_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MOST_BYTES", 1000)
    with pytest.raises(
        StateError, match=r"a value of 2.* bytes cannot be told to other ranks, which take 1000 at most"
    ):
        write(b"x" * 2000)


PLAN = ("hetu_fx.plans.plan:Plan", "pipelines")
SHAPE = [1, 1 << 62, 4]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        pickle.dumps([1, 2]),
        message({}),
        message([]),
        message([0]),
        message([-1, 1], ["tuple"]),
        message([0, 1], ["os:system"]),
        message([0, "ls"], ["subprocess:Popen", "args"]),
        message([0, 1], ["hetu_fx.launch.launcher:Launcher"]),
        message([0, 1], ["hetu_fx.comm_ops.wire.objects.codec:_Reader"]),
        message([0, "os:system"], ["class"]),
        message([0, "subprocess:Popen"], ["class"]),
        message([0, "sqlite3:Connection"], ["class"]),
        message([0, 1], PLAN),
        message([0, [[1]]], ["set"], ["list"]),
        message([0, 1, 2, 3], ["dict"]),
        message([0, "quit"], ["dtype"]),
        message([0, "zz"], ["float"]),
        message([0, "NONE"], ["hetu_fx.graph.graph:LeafKind"]),
        message([0, [1, "torch.float32"], [2, *SHAPE], ["b", 8]], ["tensor"], ["dtype"], ["tuple"], blobs=b"x" * 8),
        message(["b", 1 << 62]),
        message(["b", -1]),
        message(["b", 1], blobs=b"xx"),
        message(["=", 0]),
        message(["@", "x"]),
        message(["!", 0]),
        message(1, [1]),
        message(1, "tuple"),
        (5000).to_bytes(8) + b"[" * 5000,
        (400).to_bytes(8) + b'[[["list"]],' + b"[0," * 388,
        message([0, "9" * 5000], ["hetu_fx.plans.plan:Plan", *(f"field{i}" for i in range(10))]),
    ],
)
def test_a_strangers_bytes_are_an_error_of_ours(data: bytes) -> None:
    before = set(sys.modules)
    with pytest.raises(HetuFxError) as raised:
        decode(data, "what rank 3 has told")
    assert isinstance(raised.value, CommError)
    assert "what rank 3 has told" in str(raised.value)
    assert set(sys.modules) - before == set()


def test_any_change_of_a_byte_gives_a_value_or_an_error_of_ours() -> None:
    data = write({"plan": Plan.tensor_parallel((0, 1), (2, 1)), "x": torch.ones(3), "n": (math.inf, {1})})
    for place in range(len(data)):
        for byte in (0, 34, 57, data[place] ^ 1, data[place] ^ 128):
            try:
                decode(data[:place] + bytes([byte]) + data[place + 1 :], "a test")
            except HetuFxError:
                continue


def test_a_class_checks_itself_and_makes_what_follows_from_its_fields_when_it_is_read() -> None:
    data = write(Plan.single(0)).replace(b"1f1b", b"1f9b")
    with pytest.raises(HetuFxError, match="1f9b"):
        decode(data, "a test")
    annotation = Annotation.replicated((0, 1))
    assert b"_hash" not in write(annotation)
    assert hash(again(annotation)) == hash(annotation)
