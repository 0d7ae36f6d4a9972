"""What most scripts import, once, in the server that ranks are forked from: to import it is dearer than to run them."""

from __future__ import annotations

from importlib import import_module

from tests.scripts.script import scripts

for _name in (
    "functorch.compile",
    "hetu_fx.prepare",
    "tests.scripts.worker",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
):
    import_module(_name)
scripts()
