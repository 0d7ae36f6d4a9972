"""Which dim of an input counts rows: as asked, as sizes tell, as the graph shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import BatchError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.row_dims import AskedRowDims, count_rows, find_row_dims, other_dims, slice_rows, with_rows


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_rows_are_dim_0_of_all_inputs_that_have_as_many_there_as_the_first() -> None:
    batch = tensors(weight=(), x=(4, 6), y=(4,), mask=(6, 6))
    assert find_row_dims(batch) == {"x": 0, "y": 0}


def test_asked_dims_are_kept_and_tell_the_number_of_rows_of_the_others() -> None:
    batch = tensors(x=(7, 4, 6), y=(4,), mask=(7, 7), square=(4, 4))
    assert find_row_dims(batch, AskedRowDims({"x": 1, "square": None})) == {"x": 1, "y": 0}
    assert find_row_dims(batch, AskedRowDims({"x": -2})) == {"x": 1, "y": 0, "square": 0}


def test_a_container_is_asked_for_by_its_name_and_its_tensors_by_theirs() -> None:
    batch = {"x": torch.zeros(7, 4), "state.0": torch.zeros(2, 4, 5), "state.1": torch.zeros(4, 5)}
    asked = AskedRowDims({"x": 1, "state": 1, "state.1": 0})
    assert find_row_dims(batch, asked) == {"x": 1, "state.0": 1, "state.1": 0}


def test_nothing_is_found_where_the_user_says_that_no_input_has_rows() -> None:
    assert find_row_dims(tensors(x=(4, 6)), AskedRowDims({"x": None})) == {}


@pytest.mark.parametrize("dims", [{"x": "1"}, {"x": True}, {1: 1}])
def test_what_is_no_dim_of_a_named_input_is_refused(dims: Any) -> None:
    with pytest.raises(BatchError, match="give names of inputs"):
        AskedRowDims(dims)


def test_a_dim_that_the_input_lacks_and_a_name_of_no_input_are_refused() -> None:
    with pytest.raises(BatchError, match=r"dim 2 of input 'x' counts its rows, but its shape is \(4, 6\)"):
        find_row_dims(tensors(x=(4, 6)), AskedRowDims({"x": 2}))
    with pytest.raises(BatchError, match=r"row_dims names \['z'\], but the inputs of the batch are \['x'\]"):
        AskedRowDims({"z": 0}).check_names(tensors(x=(4, 6)))


def test_inputs_with_unlike_numbers_of_rows_are_refused_with_the_way_out() -> None:
    with pytest.raises(BatchError, match=r"(?s){'x': 4, 'y': 5}.*hint: .*row_dims="):
        count_rows(tensors(x=(7, 4), y=(5,)), {"x": 1, "y": 0})
    assert count_rows(tensors(x=(7, 4), y=(4,)), {"x": 1, "y": 0}) == 4
    assert count_rows({}, {}) == 1


def test_rows_are_cut_without_gaps_and_all_of_them_as_they_are() -> None:
    x = torch.arange(24.0).view(2, 4, 3)
    assert slice_rows(x, 1, range(4)) is x
    assert torch.equal(slice_rows(x, 1, range(1, 3)), x[:, 1:3])
    assert slice_rows(x, 1, range(1, 3)).is_contiguous()
    assert slice_rows(x, 0, range(1, 2)).data_ptr() == x[1:].data_ptr()
    assert with_rows((2, 4, 3), 1, 9) == (2, 9, 3)
    assert (other_dims(x, 1), other_dims(x, None)) == ([0, 2], [0, 1, 2])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(6, 5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor, state: Tensor, y: Tensor) -> dict[str, Tensor]:
        out, state = self.cells(x, state)
        return {"loss": nn.functional.cross_entropy(self.head(out[-1]), y), "state": state}


def recurrent_batch(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(7, rows, 6), "state": torch.randn(2, rows, 5), "y": torch.zeros(rows, dtype=torch.long)}


@pytest.mark.parametrize("rows", [4, 2, 1])  # as many rows as layers, too
def test_what_must_have_as_many_entries_as_there_are_rows_is_found_in_the_graph(rows: int) -> None:
    graph = capture(Recurrent(), recurrent_batch(rows), row_dims=AskedRowDims({"x": 1}))
    assert graph.row_dims == {"x": 1, "state": 1, "y": 0}


def test_an_input_whose_equal_size_is_chance_has_no_rows() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(x), y, weight)

    batch = {"x": torch.randn(4, 6), "weight": torch.rand(4), "y": torch.zeros(4, dtype=torch.long)}
    graph = capture(Weighted(), batch)
    assert graph.row_dims == {"x": 0, "y": 0}
    assert graph.notes == ("input 'weight' has no dim that counts rows: all ranks must pass the same",)


def test_an_input_without_rows_that_must_have_as_many_is_refused() -> None:
    with pytest.raises(
        BatchError, match=r"input 'y' has no rows, but in the model's forward its dim 0 must be as large"
    ):
        capture(Recurrent(), recurrent_batch(4), row_dims=AskedRowDims({"x": 1, "y": None}))


def test_nobody_else_takes_dim_0_of_an_input_for_its_rows() -> None:
    root = Path(__file__).parents[2]
    places = [
        *(root / "switching").rglob("*.py"),
        *(root / "hetu_fx").glob("*.py"),
        *(root / "hetu_fx/program").glob("*.py"),
    ]
    found = [str(path) for path in places if re.search(r"\.shape\[(0|:1)\]|\.size\(0\)", path.read_text())]
    assert found == []
