import gc

import pytest

from hetu_fx.base.garbage import without_collections


def test_no_garbage_is_looked_for_inside_and_afterwards_as_before() -> None:
    with without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), without_collections():
        raise ZeroDivisionError
    assert gc.isenabled()
