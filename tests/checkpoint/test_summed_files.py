"""Files of tensors with sums: any byte that is not what was written is found by whoever reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetu_fx.checkpoint import summed_files
from hetu_fx.checkpoint.summed_files import SummedFile, write_with_checksums
from hetu_fx.errors import CheckpointError


def tensors() -> dict[str, Tensor]:
    return {
        "rows": torch.arange(600.0).view(30, 20),
        "scale": torch.tensor(2.0, dtype=torch.float64),
        "half": torch.full((7,), 0.5, dtype=torch.bfloat16),
        "eighth": torch.ones(3, 2).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "waves": torch.ones(4, dtype=torch.complex64),
        "nothing": torch.zeros(0, 3),
    }


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(summed_files, "BLOCK_BYTES", 160)  # two rows
    write_with_checksums(tmp_path / "x.safetensors", tensors(), {"format": "pt"})
    return tmp_path / "x.safetensors"


def test_what_is_written_is_read_by_us_and_by_others(file: Path) -> None:
    opened, others = SummedFile(file), load_file(file)
    for name, value in tensors().items():
        opened.check(name)
        for found in (opened.value(name), others[name]):
            assert found.dtype == value.dtype
            assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)) if value.dim() else found == value


def test_whoever_sees_the_folder_may_read_the_file(file: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_bit_that_is_flipped_is_found(file: Path, place: float, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    other = file.with_name("flipped.safetensors")
    other.write_bytes(data)
    try:
        opened = SummedFile(other)
        opened.check_all()
    except CheckpointError:
        return
    # A misspelt key leaves a file without sums, which a manifest does not take for the one that it names.
    assert opened.sum is None


def test_only_blocks_that_are_wanted_are_compared(file: Path) -> None:
    data = bytearray(file.read_bytes())
    at = data.index(tensors()["rows"][20].numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    opened = SummedFile(file)
    opened.check("rows", (slice(0, 20), slice(0, 20)))
    opened.check("rows", (slice(22, 30), slice(3, 5)))
    opened.check("rows", (slice(20, 20), slice(0, 20)))
    for part in ((slice(0, 21), slice(0, 1)), (slice(0, 30), slice(19, 20)), None):
        with pytest.raises(CheckpointError, match="the sum of bytes 1600 to 1760 of 'rows' is not what was written"):
            opened.check("rows", part)


def test_a_file_is_read_on_where_another_takes_its_place(file: Path) -> None:
    opened = SummedFile(file)
    write_with_checksums(file.with_name("new"), {"rows": torch.zeros(1)}, {})
    os.replace(file.with_name("new"), file)
    opened.check_all()
    assert torch.equal(opened.value("rows"), tensors()["rows"])


def test_a_file_without_sums_is_read_as_it_is(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    opened = SummedFile(tmp_path / "x.safetensors")
    opened.check_all()
    assert opened.sum is None
    assert opened.value("x").tolist() == [1, 1]


def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="No such file"):
        SummedFile(place)
    os.mkfifo(place)
    with pytest.raises(CheckpointError, match="no regular file"):
        SummedFile(place)
    place.unlink()
    place.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"cannot read .*x\.safetensors"):
        SummedFile(place)
