"""Clients of the public API: accelerate and transformers.

`patches()` lists what is replaced in them, and `unpatch()` puts back what was there.
"""

from hetu_fx.base.patches import Hook as Hook
from hetu_fx.base.patches import Patch as Patch
from hetu_fx.integrations.patching import patches as patches
from hetu_fx.integrations.patching import unpatch as unpatch
