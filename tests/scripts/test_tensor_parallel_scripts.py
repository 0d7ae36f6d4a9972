"""What scripts do to their model, tensor parallel or in a pipeline, on two processes: a selection."""

from __future__ import annotations

import pytest

from tests.scripts.conftest import Crews
from tests.scripts.script import Script
from tests.scripts.selected import check, selected


@pytest.mark.distributed
@pytest.mark.parametrize(("script", "setting"), selected("tp2", "pp2"))
def test_a_script_comes_out_as_on_one_device_or_is_refused_by_name(script: Script, setting: str, crews: Crews) -> None:
    check(script, setting, crews)
