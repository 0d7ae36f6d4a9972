"""Types of devices are records: two stand in the tree, others come by entry point, and each is known by one name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hetu_fx
from hetu_fx.base.device_types import CPU, CUDA, DeviceType, device_type_record, device_types
from hetu_fx.errors import EnvironmentProblem
from tests.kinds.testkind import NAME, on_testkind


def test_the_host_stands_first_and_cuda_is_known_without_one() -> None:
    assert device_types()[:2] == (CPU, CUDA)
    assert device_type_record(torch.device("cuda", 3)) is CUDA


def test_a_type_that_nobody_has_told_of_is_refused_with_the_way_out() -> None:
    with pytest.raises(EnvironmentProblem, match=r"type 'xpu' are not known, only .*\nhint: .*group 'hetu_fx.kinds'"):
        device_type_record(torch.device("xpu"))


def test_a_second_record_of_a_name_is_refused() -> None:
    CPU.register()
    with pytest.raises(EnvironmentProblem, match="'cpu' is known already"):
        DeviceType(name="cpu", count=lambda: 1, chip=str).register()


def test_ops_are_given_as_a_set_of_names() -> None:
    with pytest.raises(EnvironmentProblem, match=r"'lacks' must be a set of names, not 'aten\.topk\.default'"):
        DeviceType(name="one", count=lambda: 1, chip=str, lacks="aten.topk.default")


@on_testkind
def test_a_type_without_a_backend_of_its_own_meets_over_the_host_s() -> None:
    assert DeviceType.group_backends() == "gloo"
    assert device_type_record(torch.device(NAME)).chip(torch.device(NAME)) == NAME


PACKAGE = """
from hetu_fx.base.device_types import DeviceType
npu = DeviceType(name="npu", count=lambda: 4, chip=lambda device: f"chip-{device.index}", lacks={"aten.topk.default"})
nothing = 3
"""


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("kinds_of_a_test:npu", "npu chip-2"),
        ("kinds_of_a_test:nothing", "EnvironmentProblem: entry point 'npu' of hetu_fx.kinds gives 3, but must give"),
        ("kinds_of_a_test:absent", "EnvironmentProblem: entry point 'npu' of hetu_fx.kinds does not load"),
    ],
)
def test_a_package_adds_a_type_by_an_entry_point(point: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "kinds_of_a_test.py").write_text(PACKAGE)
    told = tmp_path / "kinds_of_a_test-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: kinds-of-a-test\nVersion: 1\n")
    (told / "entry_points.txt").write_text(f"[hetu_fx.kinds]\nnpu = {point}\n")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from hetu_fx.base.device_types import device_types
found = device_types()[-1]
class Npu:
    index = 2
print(found.name, found.chip(Npu))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert said in ran.stdout + ran.stderr


# A table's row for a kernel that one type has, and what torch keeps private.
KNOWS_A_TYPE = ("base/device_types.py", "base/torch_private.py", "rewrites/sequence_ops.py")
ASKS_THE_TYPE = re.compile(r"torch\.cuda\.|\.is_cuda\b|== ?\"cuda\"|\(\"cpu\", \"cuda\"\)")


def test_nothing_else_asks_whether_a_device_is_of_a_type() -> None:
    root = Path(hetu_fx.__file__).resolve().parent
    folders = (root, *(root.parent / name for name in ("comm_ops", "transforms", "switching", "integrations")))
    files = [path for folder in folders for path in folder.rglob("*.py") if not str(path).endswith(KNOWS_A_TYPE)]
    assert len(files) > 300
    found = [str(path) for path in files if ASKS_THE_TYPE.search(path.read_text())]
    assert not found
