"""The dtypes that models in float32 compute in where that is faster, by torch's names."""

from __future__ import annotations

from hetu_fx.base.documents import nearest
from hetu_fx.errors import HetuFxError

LOW_DTYPES = ("bfloat16", "float16")


def check_low_dtype(error: type[HetuFxError], what: str, dtype: str) -> None:
    """Raise `error` for a dtype that is none of them."""
    if dtype not in LOW_DTYPES:
        raise error(f"{what} has dtype {dtype!r}{nearest(dtype, LOW_DTYPES)}")
