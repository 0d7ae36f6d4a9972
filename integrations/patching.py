"""What is replaced in other libraries: `patches` lists it, `unpatch` takes it out."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from hetu_fx.base.patches import Hook, Patch, install_patches, known_patches, remove_patches


def patches() -> tuple[Patch | Hook, ...]:
    """Return everything that is replaced in other libraries, whether it is in or not."""
    from hetu_fx import auto_parallelize  # noqa: F401  (with it comes what is replaced in torch)

    for one in iter_modules([str(Path(__file__).parent)]):
        import_module(f"hetu_fx.integrations.{one.name}")  # it registers what it replaces
    return known_patches()


def patch_what_is_loaded() -> None:
    """Put in the patches of all libraries that are loaded by now; what is in stays.

    Raises:
        EnvironmentProblem: the installed version of one lacks what is needed.
    """
    patches()
    install_patches()


def unpatch() -> None:
    """Put back what was there before; the next model that is made parallel has the patches put in again.

    Torch's stay: parallel models that are there step by them, and optimizers of others do not notice them. Where there
    are none, `hetu_fx.base.patches.remove_patches("torch")` puts these back too.
    """
    for library in {patch.library for patch in known_patches()} - {"torch"}:
        remove_patches(library)
