"""The sdist and the wheel: built, checked, and tried in a new environment: `make package`.

Everything that it makes is in build/: dist/ has what would be uploaded.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from subprocess import CalledProcessError

from tests.packaging.environments import BUILD, ROOT, TO_TEST, TREE, Environment, NotInIndexError, Torch, held, run

DIST = BUILD / "dist"
TOOLS = ("build", "twine")
ALONE = ("tests/base/test_torch_private_calls.py", "tests/packaging/test_smoke.py")
"""Tests that need nothing of the repository."""
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "Makefile", "CHANGELOG.md", "tests/packaging/test_smoke.py")
MOST_BYTES = 8 << 20
PROBE = "import hetu_fx; print(hetu_fx.__file__); from hetu_fx.cli.main import main; print(main(['env']))"


def main() -> int:
    """Build, check and try; the status is 1 if anything is wrong."""
    asked = argparse.ArgumentParser(description="Build the sdist and the wheel, and try them in a new environment.")
    asked.add_argument("torch", help="the requirement by which the new environment gets its torch")
    given = asked.parse_args()
    tools = Environment.at("venv-tools")
    tools.install(*TOOLS)
    shutil.rmtree(DIST, ignore_errors=True)
    with held(TREE):
        run(tools.python, "-m", "build", "--outdir", DIST)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    run(tools.python, "-m", "twine", "check", "--strict", sdist, wheel)
    wrong = [*wrong_in_wheel(wheel), *wrong_in_sdist(sdist)]
    print(f"built {sdist.name} ({sdist.stat().st_size >> 10} KiB), {wheel.name} ({wheel.stat().st_size >> 10} KiB)")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    return try_wheel(wheel, given.torch)


def wrong_in_wheel(wheel: Path) -> Iterable[str]:
    """Yield what a wheel lacks, or has too much of: it has the packages' modules and data, and a licence."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    expected = {
        f"{package.replace('.', '/')}/{file.name}" for package in settings["packages"] for file in files(package)
    }
    expected |= {f"{package}/{name}" for package, data in settings["package-data"].items() for name in data}
    yield from (f"{wheel.name} lacks {name}" for name in sorted(expected - names))
    yield from (f"{wheel.name} has {name}, which is in no package" for name in sorted(names - expected))
    if not licences:
        yield f"{wheel.name} has no LICENSE"
    if wheel.stat().st_size > MOST_BYTES:
        yield f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}"


def files(package: str) -> Iterable[Path]:
    """List the modules of a package, where the repository has them."""
    places = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    first = max((name for name in places if f"{package}.".startswith(f"{name}.")), key=len, default=package)
    folder = ROOT / places.get(first, first) / package[len(first) :].strip(".").replace(".", "/")
    return folder.glob("*.py")


def wrong_in_sdist(sdist: Path) -> Iterable[str]:
    """Yield what an sdist lacks."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"{sdist.name} lacks {name}" for name in IN_SDIST if name not in names)


def try_wheel(wheel: Path, torch: str) -> int:
    """Install a wheel into a new environment, resolve its extras, and run what tests it outside of the repository."""
    environment = Environment.at("venv-wheel", clear=True)
    environment.install(*shlex.split(torch))
    environment.install(str(wheel), *TO_TEST)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = run(environment.python, "-c", PROBE, cwd=folder).splitlines()[0]
        if not Path(where).is_relative_to(environment.folder):
            print(f"hetu_fx was imported from {where}, not from {environment.folder}", file=sys.stderr)
            return 1
        for test in ALONE:
            shutil.copy(ROOT / test, folder)
        status = environment.pytest(
            "-c", "/dev/null", "--rootdir", folder, "--import-mode", "importlib", folder, cwd=folder
        )
    return status or resolve_extras(environment, wheel, Torch.find(torch, environment).version)


def resolve_extras(environment: Environment, wheel: Path, torch: str) -> int:
    """See whether pip finds what each extra asks for, beside the torch that is there; say which it does not."""
    failed = 0
    for extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]:
        try:
            count = len(environment.resolve(f"{wheel}[{extra}]", f"torch=={torch}"))
            print(f"extra {extra}: {count} packages more", flush=True)
        except (NotInIndexError, CalledProcessError) as error:
            print(f"extra {extra} cannot be resolved: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
