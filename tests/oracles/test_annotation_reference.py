"""shard and unshard are inverse to each other."""

import numpy as np
import pytest

from hetu_fx.annotations.annotation import parse_annotation
from tests.oracles.annotation_reference import shard, unshard


@pytest.mark.parametrize(
    "text",
    [
        "[0-3] S(0, 2:1) D(2)",
        "[0-3] P(2) S(1, 2)",
        "D(2) over {[4]; [0-3] P(2) S(0, 1:2)}",
        "P(2) over {[0,1] S(1, 2); [2]}",
        "S(0, 3:1) over {[0,1] P(2); [2,3] S(0, 2)}",
    ],
)
def test_what_is_sharded_comes_back(text):
    annotation, array = parse_annotation(text), np.arange(96.0).reshape(24, 4)
    locals_ = shard(array, annotation)
    for copy in range(len(annotation.copy_sets)):
        np.testing.assert_array_equal(unshard(locals_, annotation, array.shape, copy), array)
