"""What all tests share: golden texts, and the checks of a module on several processes."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from tests.costs import ROOT, CostRecorder, left_out, longest_first, read_costs, this_commit
from tests.ranks.checks import Outcome, run_checks
from tests.spawned import keep_what_is_there

# Tests never depend on time: a loaded machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

os.environ.setdefault("HETU_FX_PROGRESS", "0")  # what is said on stderr depends on how busy the machine is

os.environ.setdefault("HETU_FX_CHECK", "0")  # plans are tried in tests/check, which ask for it: it takes a second each

SECONDS_IN_ALL = 420

LEFT_OUT = pytest.StashKey[frozenset[str]]()

TESTS_OF_CAPTURES = ("graph", "program")
CAPTURES = "HETU_FX_TESTS_CAPTURES"  # as `ranks.capture_store`, which imports torch, has it
DISTRIBUTED = "mark.distributed"  # stands in all files that have such tests

# Pytest listens to loggers that do not propagate, too. Torch tells this one, while it traces, where each size is from,
# with the whole stack: a tenth of a capture. Nobody reads it here.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]

gc.disable()  # until all is collected: what is imported stays


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out other commits' files, and, where only distributed tests are asked for, files without any."""
    if config.stash[LEFT_OUT] and collection_path.relative_to(ROOT).as_posix() in config.stash[LEFT_OUT]:
        return True
    only_distributed = config.option.markexpr.startswith("distributed")
    is_file_of_tests = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if only_distributed and is_file_of_tests and DISTRIBUTED not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a distributed test whose file would be ignored where only these are asked for; order the others."""
    files = {item.path for item in items if item.get_closest_marker("distributed")}
    hidden = sorted(str(path) for path in files if DISTRIBUTED not in path.read_text())
    if hidden:
        raise pytest.UsageError(f"{hidden} have distributed tests, but do not say {DISTRIBUTED!r}")
    if hasattr(config, "workerinput"):
        longest_first(items, read_costs(config.option.markexpr))


def pytest_collection_finish() -> None:
    """Let garbage be looked for among what tests make."""
    keep_what_is_there()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of this run a folder for captures, unless several runs share one; start long files first."""
    if CAPTURES not in os.environ:
        os.environ[CAPTURES] = tempfile.mkdtemp(prefix="hetu_fx_captures_")
        config.add_cleanup(partial(shutil.rmtree, os.environ[CAPTURES]))
        config.add_cleanup(partial(os.environ.pop, CAPTURES))
    costs = read_costs(config.option.markexpr) if config.option.shares > 1 else {}
    config.stash[LEFT_OUT] = left_out(costs, config.option.shares, this_commit())
    config.option.loadscopereorder = False  # xdist would start those with the most tests first
    if config.option.write_costs and not hasattr(config, "workerinput"):
        config.pluginmanager.register(CostRecorder(config.option.markexpr))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let golden texts be written anew, and how long files take; let long files be run in shares."""
    parser.addoption("--update-goldens", action="store_true", help="write golden texts anew instead of comparing")
    parser.addoption("--write-costs", action="store_true", help="write how long files take to tests/costs.toml")
    parser.addoption("--shares", type=int, default=1, metavar="N", help="run one of N shares of the long files")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many files were left to other commits."""
    if config.stash[LEFT_OUT]:
        files, shares = len(config.stash[LEFT_OUT]), config.option.shares
        terminalreporter.write_line(f"one of {shares} shares: {files} long files were left out; make test-all runs all")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Give a function that holds a text against goldens/NAME.txt beside the test's file, or writes it there."""

    def hold(name: str, text: str) -> None:
        path = request.path.parent / "goldens" / f"{name}.txt"
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text, f"{path.name} differs; if it should, run pytest --update-goldens"

    return hold


@pytest.fixture(autouse=True)
def equal_models_are_captured_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Capture a model only once in a process, except in tests of captures."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder in TESTS_OF_CAPTURES or "hetu_fx.program.tracer" not in sys.modules:  # few tests need torch
        yield
        return
    from tests.ranks.remembered import remembered_captures

    with remembered_captures():
        yield


@pytest.fixture(scope="session")
def gloo_checks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Outcome]:
    """Give what runs the checks of a file on `world` processes (`ranks.checks`), and remembers what came out."""
    known: dict[tuple[str, int], Outcome] = {}

    def run(file: str, world: int, seconds: float = SECONDS_IN_ALL) -> Outcome:
        if (file, world) not in known:
            known[file, world] = run_checks(file, world, tmp_path_factory.mktemp("gloo"), seconds)
        return known[file, world]

    return run


@pytest.fixture
def losses_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses be computed in float64 in one test."""
    import torch

    from tests.end_to_end.cells import in_double  # here, as few tests need the models that it imports

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.float)  # which `in_double` replaces
    in_double()


@pytest.fixture
def distributions_checked() -> None:
    """Turn checks of distributions on, as they are until torch.compile in another test turns them off."""
    import torch

    torch.distributions.Distribution.set_default_validate_args(True)
