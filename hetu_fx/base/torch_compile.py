"""What we use of torch's compilers: graphs whose inputs are known are handed to them without Dynamo.

Dynamo finds out what a Python function does; of our graphs that is known. Without it, a graph that was compiled before
is ready in hundredths of a second (what was made is found by content, in inductor's own cache), and nothing is asked at
each call but what we ask.

All C++ kernels of several graphs in one library: what inductor compiles them one by one for is mostly headers. Of a
kernel's 0.6 s (1.9 s without a precompiled header, which takes 4 s itself) its own lines take 0.05 s. Here kernels wait
until all graphs that are compiled together have been written, and one call of the compiler makes them all. Kept by
content beside inductor's own files, in the user's cache; the next process finds each kernel there. Built on private
parts of torch: `hetu_fx.base.torch_private` says how these are held.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from hetu_fx.base.torch_private import FakeTensorMode, keeping_sizes, new_size
from hetu_fx.errors import EnvironmentProblem

_FIRST = ("torch/csrc/inductor/cpp_prefix.h", "Python.h", "sstream", "cstdlib", "cerrno")
"""Headers that inductor's kernels and their bindings begin with."""
_INCLUDE = re.compile(r"^\s*#include\s*[<\"]([^>\"]+)[>\"]\s*$", re.MULTILINE)
_FLAG = re.compile(r"-m([a-z0-9.-]+)")
NATIVE = ("-march=native", "-mcpu=native")
"""How compilers are told to use all that this processor has; some know the second alone."""


class _Compiling:
    """Where ranks are threads, one compiles at a time, and finds what another has compiled.

    Attributes:
        lock: of all that compiles: what is put in the place of inductor's functions is there for all threads.
        collects: kernels wait to be one library, in the thread that has the lock.
    """

    def __init__(self) -> None:
        self.lock, self.collects = threading.RLock(), False


compiling = _Compiling()


@contextmanager
def one_library() -> Iterator[None]:
    """Let all C++ kernels of graphs that inductor compiles or loads inside wait, and be one library at the end.

    Those of this thread; kernels of others stay as they are. One inside another is part of that.
    """
    from torch._inductor import async_compile, cpu_vec_isa

    with compiling.lock, ExitStack() as stack:
        if compiling.collects:
            yield
            return
        waiting = _WaitingKernels(threading.get_ident())
        stack.enter_context(waiting.instead_of(async_compile.AsyncCompile))
        stack.enter_context(_without_probes(cpu_vec_isa.VecISA))
        compiling.collects = True
        try:
            yield
        finally:  # also what was compiled before something else failed
            compiling.collects = False
            waiting.make()


class _Kernel:
    """A kernel that is not there yet: its code under a name of its own, and where it is to be put."""

    def __init__(self, argument_types: Sequence[str], code: str, command: str) -> None:
        content = "\n".join((_compiler(), torch.__version__, command, *argument_types, code))
        self.name = f"kernel_{hashlib.sha256(content.encode()).hexdigest()[:32]}"
        self._types, self._code = argument_types, code

    @property
    def path(self) -> Path:
        """Return the library that has it, if one has been made: a link for each kernel that a library has."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return Path(cache_dir(), "hetu_fx", f"{self.name}.so")

    @property
    def source(self) -> str:
        """Return its code and its Python binding, as inductor writes them."""
        written: list[str] = []

        def write(main_code: str, *args: Any, **kwargs: Any) -> Callable[[], None]:
            written.append(main_code)
            return lambda: None

        _binding(self.name, load_async=staticmethod(write)).load_pybinding_async(self._types, self._code)
        return written[0]

    def __call__(self, *arguments: Any) -> None:
        """Run it where its place was not filled, as compiling failed: to say so again, or to do it now."""
        if not self.path.exists():
            _build([self])
        self.load()(*arguments)

    def load(self) -> Callable[..., None]:
        """Return the function."""
        binding = _binding(self.name)
        found: Callable[..., None] = getattr(binding._load_library_inner(str(self.path), self.name), self.name)
        return found


class _WaitingKernels:
    """Kernels that wait, and the names in modules that are to have them."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._kernels: dict[str, _Kernel] = {}
        self._places: list[tuple[MutableMapping[str, Any], str, _Kernel]] = []

    @cached_property
    def command(self) -> str:
        """Return how the compiler is called."""
        return _command()

    @contextmanager
    def instead_of(self, kind: Any) -> Iterator[None]:
        """Take what a class is asked to compile in this thread."""
        stock_kernel, stock_wait, waiting = kind.cpp_pybinding, kind.wait, self

        def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
            if threading.get_ident() != waiting._thread:
                return stock_kernel(self, argtypes, source_code)
            kernel = _Kernel(argtypes, source_code, waiting.command)
            return waiting._kernels.setdefault(kernel.name, kernel)

        def wait(self: Any, scope: dict[str, Any]) -> None:
            waiting._places += [(scope, name, value) for name, value in scope.items() if isinstance(value, _Kernel)]
            stock_wait(self, scope)

        with mock.patch.multiple(kind, cpp_pybinding=cpp_pybinding, wait=wait):
            yield

    def make(self) -> None:
        """Compile those that no library has, and put all in their places."""
        missing = [kernel for kernel in self._kernels.values() if not kernel.path.exists()]
        if missing:
            _build(missing)
        functions = {name: kernel.load() for name, kernel in self._kernels.items()}
        for scope, name, kernel in self._places:
            scope[name] = functions[kernel.name]


def _build(kernels: Sequence[_Kernel]) -> None:
    """Make one library of kernels, and a link to it for each."""
    from torch._inductor import config

    sources = [(kernel.name, kernel.source) for kernel in kernels]
    headers = dict.fromkeys((*_FIRST, *(header for _, source in sources for header in _INCLUDE.findall(source))))
    parts = (_part(number, name, source) for number, (name, source) in enumerate(sources))
    code = "\n".join(("#define PY_SSIZE_T_CLEAN", *(f"#include <{header}>" for header in headers), *parts))
    with config.patch(cpp_cache_precompile_headers=False):  # makes up for itself from the fourth library on
        library = _binding(kernels[0].name).load_async(code)()
    for kernel in kernels:
        kernel.path.parent.mkdir(exist_ok=True)
        _link(Path(library.__file__), kernel.path)


def _part(number: int, name: str, source: str) -> str:
    """Return a kernel's source such that it can stand beside others: all of them are called `kernel`."""
    own = _INCLUDE.sub("", source).replace("#define PY_SSIZE_T_CLEAN", "")
    return f"namespace part_{number} {{\n#define kernel {name}\n{own}\n#undef kernel\n}}"


def _link(library: Path, path: Path) -> None:
    """Let a path lead to a library, whoever else does so at the same time."""
    new = path.with_suffix(f".{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(library)
    new.replace(path)


def _binding(name: str, **changed: Any) -> Any:
    """Return inductor's way to a kernel of this name."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    body = {"entry_function": name, "call_entry_function": f"{name}({{}}); Py_RETURN_NONE;", "cache": {}}
    return type(CppPythonBindingsCodeCache.__name__, (CppPythonBindingsCodeCache,), body | changed)


@cache
def _compiler() -> str:
    """Return what the C++ compiler says of itself and of this processor: the macros that it defines."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    for native in NATIVE:
        command = [get_cpp_compiler(), native, "-dM", "-E", "-x", "c++", os.devnull]
        made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if made.returncode == 0:
            return made.stdout
    raise EnvironmentProblem(f"{' '.join(command)} failed: {made.stderr.strip()}\nhint: choose a C++ compiler by CXX")


def _command() -> str:
    """Return how inductor calls the compiler for a kernel: its settings are in there."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    flags = CppPythonBindingsCodeCache.cpp_compile_command_flags
    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", **flags)
    return str(CppBuilder(name="o", sources="i", BuildOption=options).get_command_line())


@contextmanager
def _without_probes(kind: Any) -> Iterator[None]:
    """Ask the compiler for its macros where inductor compiles six programs, to see which vector instructions work.

    Told to use all, it has a macro where both it and the processor know an extension; so the answers are the same. They
    take 6 s less, and where programs have been compiled before, 1 s.
    """
    stock = kind.check_build

    def check_build(self: Any, code: str) -> bool:
        flags = self.build_arch_flags().split()
        names = [_FLAG.fullmatch(flag) for flag in flags]
        if not flags or not all(names):
            return bool(stock(self, code))
        macros = set(_compiler().split())
        return all(f"__{name[1].upper().replace('-', '_').replace('.', '_')}__" in macros for name in names if name)

    with mock.patch.object(kind, "check_build", check_build):
        yield


Compiled = Callable[..., Any]


class Symbols:
    """Inputs to trace a graph with: sizes that are open, and tensors of them that have no numbers."""

    def __init__(self) -> None:
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        self._names = (f"open_{number}" for number in itertools.count())

    def size(self, example: int) -> torch.SymInt:
        """Return an open size of at least 2: 0 and 1 are what graphs differ by."""
        return cast(torch.SymInt, new_size(self._mode, next(self._names), example))

    def number(self, example: int) -> torch.SymInt:
        """Return an open number, whatever it is."""
        source = ConstantSource(next(self._names))
        symbol = self._environment.create_symbol(
            example, source, DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        return cast(torch.SymInt, self._environment.create_symintnode(symbol, hint=example, source=source))

    def tensor(self, sizes: Sequence[Any], strides: Sequence[Any], requires_grad: bool, **options: Any) -> Tensor:
        """Return a tensor without numbers."""
        with self._mode:
            return torch.empty_strided(sizes, strides, **options).requires_grad_(requires_grad)

    def run(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Return what a graph makes of such inputs."""
        with self._mode, keeping_sizes():
            return fx.Interpreter(module).run(*inputs)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace graphs of such inputs inside."""
        with tracing(TracingContext(self._mode)):
            yield

    def condition(self, numbers: Sequence[torch.SymInt]) -> Callable[[Sequence[int]], bool]:
        """Return what tells of values of these open numbers whether what was found out while tracing holds for them."""
        text = self._environment.produce_guards_expression(list(numbers))
        if not text:
            return lambda values: True
        return functools.partial(self._environment.evaluate_guards_expression, text)


LEAST_BUDGET = 1e-9
"""What stands for a memory budget of 0, for which torch computes again also what is marked to be kept."""


def memory_budget() -> float:
    """Return how much of what backwards keep at most is kept, as torch is told to compile: 1 for all, 0 for inputs."""
    return float(torch._functorch.config.activation_memory_budget)


@contextmanager
def budget_that_keeps(draws: bool) -> Iterator[None]:
    """Let torch compile inside such that nothing that is marked (`keep`) or drawn is made twice."""
    budget = 1.0 if draws else max(memory_budget(), LEAST_BUDGET)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        yield


def keep(node: fx.Node) -> None:
    """Mark what an op makes in forward to be kept if backward reads it, and never to be made again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def by_inductor(module: fx.GraphModule, inputs: Sequence[Any], tag: str = "") -> Compiled:
    """Compile a graph, which is taken over, and its backward, at once: kept apart from those of other tags."""
    from torch._inductor.compile_fx import compile_fx  # seconds, where nothing is compiled

    compiler: Any = torch.compiler.config
    key = f"{compiler.cache_key_tag} {tag}".strip()
    at_once: Any = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with at_once, compiler.patch(cache_key_tag=key):
        return cast(Compiled, compile_fx(module, list(inputs)))


def is_compiler_defect(error: Exception) -> bool:
    """Tell whether torch could not compile a graph that is right, by a defect of its own; not for want of a compiler.

    Two are known: torch 2.14.1 cannot part forward and backward of a checkpointed block of one row, and 2.13 compares
    sizes that are open where it sorts strides.
    """
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    if isinstance(error, InductorError):
        return not isinstance(error.inner_exception, (InvalidCxxCompiler, CppCompileError, ImportError, OSError))
    return isinstance(error, AssertionError) and str(error).endswith("was invalid, but is output")


def aot_autograd(**compilers: Any) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Return what compiles a graph and its backward by what compiles forwards and backwards of joint graphs."""
    from torch._dynamo.backends.common import aot_autograd  # seconds, where nothing is compiled

    made: Callable[[fx.GraphModule, Sequence[Any]], Compiled] = aot_autograd(**compilers)
    return made


def insert_checkpointed_call(graph: fx.Graph, body: fx.Node, inputs: Sequence[fx.Node]) -> fx.Node:
    """Add the call of a body, a graph module's, that is to be run again in backward."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    return graph.call_function(tag_activation_checkpoint, (body, *inputs))


def keep_only(body: fx.GraphModule, contexts: Callable[[], Any], name: str) -> None:
    """Let contexts of torch.utils.checkpoint say what of a body that is run again is kept; caches see the name."""
    contexts = functools.partial(contexts)
    contexts.cache_hash = name  # type: ignore[attr-defined]
    body.meta["_checkpoint_context_fn"] = contexts
