"""What most processes of tests import, once, in the server that they are forked from: to import it is dear."""

from __future__ import annotations

import gc
from importlib import import_module

gc.disable()  # what is imported stays

from tests.spawned import keep_what_is_there  # noqa: E402

for _name in (
    "accelerate",
    "functorch.compile",
    "hetu_fx.prepare",
    "peft",
    "tests.scripts.worker",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.trainer",
):
    import_module(_name)
import_module("tests.scripts.script").scripts()
keep_what_is_there()
gc.enable()
