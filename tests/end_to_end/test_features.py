"""What batches, variants and cut factors may be beside plain ones, on four processes started once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end import checks_batches, checks_parts, checks_variants
from tests.end_to_end.twins import WORLD

SECONDS_IN_ALL = 900
CHECKS = {
    name: check
    for module in (checks_batches, checks_variants, checks_parts)
    for name, check in vars(module).items()
    if name.startswith("check_")
}
# The ranks run what they find in this module.
globals().update(CHECKS)


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS_IN_ALL + 60)
@pytest.mark.parametrize("name", CHECKS)
def test_on_four_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD, SECONDS_IN_ALL)[name] if report]
    assert not failures, "\n".join(failures)
