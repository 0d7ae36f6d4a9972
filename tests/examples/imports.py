"""What most examples import, once, in the server that their processes are forked from."""

from __future__ import annotations

from importlib import import_module

for _name in (
    "accelerate",
    "functorch.compile",
    "hetu_fx.prepare",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.trainer",
):
    import_module(_name)
