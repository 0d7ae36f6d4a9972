"""All C++ kernels of several graphs in one library: what inductor compiles them one by one for is mostly headers.

Of a kernel's 0.6 s (1.9 s without a precompiled header, which takes 4 s itself) its own lines take 0.05 s. Here kernels
wait until all graphs that are compiled together have been written, and one call of the compiler makes them all. Kept by
content beside inductor's own files, in the user's cache; the next process finds each kernel there. Built on private
parts of torch: `hetu_fx.base.torch_private` says how these are held.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hetu_fx.errors import EnvironmentProblem

_FIRST = ("torch/csrc/inductor/cpp_prefix.h", "Python.h", "sstream", "cstdlib", "cerrno")
"""Headers that inductor's kernels and their bindings begin with."""
_INCLUDE = re.compile(r"^\s*#include\s*[<\"]([^>\"]+)[>\"]\s*$", re.MULTILINE)
_FLAG = re.compile(r"-m([a-z0-9.-]+)")
NATIVE = ("-march=native", "-mcpu=native")
"""How compilers are told to use all that this processor has; some know the second alone."""
_this_thread = threading.local()
_changing = threading.Lock()  # what is put in the place of inductor's functions is there for all threads


@contextmanager
def one_library() -> Iterator[None]:
    """Let all C++ kernels of graphs that inductor compiles or loads inside wait, and be one library at the end.

    Those of this thread; kernels of others stay as they are. One inside another is part of that.
    """
    from torch._inductor import async_compile, cpu_vec_isa

    if getattr(_this_thread, "waits", False):
        yield
        return
    waiting = _WaitingKernels(threading.get_ident())
    with ExitStack() as stack:
        stack.enter_context(_changing)
        stack.enter_context(waiting.instead_of(async_compile.AsyncCompile))
        stack.enter_context(_without_probes(cpu_vec_isa.VecISA))
        _this_thread.waits = True
        try:
            yield
        finally:  # also what was compiled before something else failed
            _this_thread.waits = False
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
