"""Fused optimizers in one file: copy it, and `cuda/` beside it, into a project.

    from fusedopt import FusedAdam

    optimizer = FusedAdam(model.parameters(), lr=3e-4, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")

How one step runs:

    optimizer.step()           fusedopt.py             find the plan, or make it: states, kernels
      plan.step()              cuda/bindings.cpp       read each p.grad and each group's values
        advance<<<>>>          cuda/multi_tensor.cuh   step counters, found_inf, bias corrections
        update<<<>>>           cuda/multi_tensor.cuh   tile -> slice: load, update, store
          Adam::apply()        cuda/update_rules.cuh   the algorithm, one element
      (with max_grad_norm, norm<<<>>> of cuda/gradients.cuh reads all gradients first)
    back: parameters and states changed in place; step() returns the closure's loss

Without a compiler, or on other devices, the same step runs as plain PyTorch operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import math
import operator
import os
import platform
import re
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from enum import Enum, auto
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import ParamsT
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "BuildError",
    "FusedAdam",
    "FusedLion",
    "FusedOptWarning",
    "FusedSGD",
    "clip_grad_norm_",
    "fp8_dequantize",
    "fp8_parameter",
    "step_in_backward",
]

# ==================================================================================================
# Building the extension
# ==================================================================================================

_log = logging.getLogger("fusedopt")
_lock = threading.Lock()
_builder_lock = threading.Lock()
_loaded: dict[_Binary, Future[ModuleType | ctypes.CDLL]] = {}
_warned: set[str] = set()

# What compilers print when they fail, and what to do about it; the first match is shown.
_FIXES = {
    r"unsupported (GNU|clang) version": "set CXX and CC to an older g++ and gcc",
    r"Unsupported gpu architecture": "set TORCH_CUDA_ARCH_LIST to what this nvcc knows",
    r"No space left|quota": "free disk space, or point FUSEDOPT_CACHE_DIR elsewhere",
    r"Killed|out of memory": "the compiler ran out of memory: build on a machine with more",
    r"": "correct the source, or try another compiler (CXX) or CUDA toolkit (CUDA_HOME)",
}


class FusedOptWarning(UserWarning):
    """A slower path, or another directory than the one asked for, is used; the text says why."""


class BuildError(RuntimeError):
    """A kernel or the bindings could not be built or loaded; the text says why and what to do."""


def _warn_once(text: str) -> None:
    with _lock:
        known = text in _warned
        _warned.add(text)
    if not known:
        warnings.warn(text, FusedOptWarning, stacklevel=3)


def _backend_for(device_type: str) -> str:
    """Say what updates tensors on ``device_type``: "cuda", "cpu", or "torch" (no kernels)."""
    forced = os.environ.get("FUSEDOPT_BACKEND", "")
    if forced not in ("", "cuda", "cpu", "torch"):
        raise ValueError(f"FUSEDOPT_BACKEND must be cuda, cpu or torch, got {forced!r}")
    if forced == "torch":
        return "torch"
    if forced and forced != device_type:
        raise RuntimeError(f"FUSEDOPT_BACKEND={forced} cannot update {device_type} tensors")
    if device_type not in ("cuda", "cpu"):
        reason = f"there are kernels for cuda and cpu, not for {device_type}"
    else:
        reason = _missing(device_type)
        if not reason or _Binary.is_prebuilt("bindings", device_type, "bindings.cpp"):
            return device_type
    if forced:
        raise BuildError(f"FUSEDOPT_BACKEND={forced} is not possible: {reason}")
    _warn_once(
        f"fusedopt updates {device_type} tensors by plain PyTorch operations, which is slower: "
        f"{reason} (FUSEDOPT_BACKEND=torch silences this)"
    )
    return "torch"


def _missing(backend: str) -> str:
    """Name what is missing to build for ``backend``, each with its fix; empty if nothing is."""
    found = []
    if not sys.platform.startswith("linux"):
        found.append("kernels are built on Linux only")
    if _source_dir() is None:
        found.append(f"no sources: copy fusedopt's folder cuda/ into {Path(__file__).parent}")
    if shutil.which(compiler := (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]) is None:
        found.append(f"no C++ compiler {compiler}: `apt install g++`, or set CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        found.append("no Python.h: `apt install python3-dev`")
    if shutil.which("ninja") is None:
        here = Path(sys.executable).parent
        fix = f"put {here} on PATH" if (here / "ninja").exists() else "`pip install ninja`"
        found.append(f"no ninja: {fix}")
    if importlib.util.find_spec("setuptools") is None:  # torch's builder imports it.
        found.append("no setuptools: `pip install setuptools`")
    if backend == "cuda" and torch.version.cuda is None:
        found.append(f"torch {torch.__version__} is built without CUDA")
    elif backend == "cuda" and _find_cuda_home() is None:
        looked = "; ".join(_search_cuda_home()[1])
        found.append(
            f"no nvcc for CUDA {torch.version.cuda}: "
            f'`pip install "fusedopt[nvcc]"`, or set CUDA_HOME (looked at: {looked})'
        )
    return ", ".join(found)


def _find_cuda_home() -> Path | None:
    """Return the CUDA toolkit that fits torch, or None."""
    return _search_cuda_home()[0]


@functools.cache
def _search_cuda_home() -> tuple[Path | None, tuple[str, ...]]:
    """Return the toolkit that fits torch, and each place rejected before it with the reason."""
    rejected: dict[Path, str] = {}
    for origin, home in _cuda_candidates():
        if home not in rejected:
            if not (reason := _reject_cuda_home(home)):
                return home, tuple(rejected.values())
            rejected[home] = f"{origin} {home}: {reason}"
    return None, tuple(rejected.values())


def _cuda_candidates() -> Iterator[tuple[str, Path]]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            yield f"${variable}", Path(value)
    if nvcc := shutil.which("nvcc"):
        # nvcc may be a link or a script that starts the real one; only that one knows where it is.
        if here := re.search(r"(?m)^#\$ _HERE_=(.+)$", _output_of(nvcc, "--dryrun", "x.cu")):
            yield "behind nvcc", Path(here[1]).resolve().parent
        yield "nvcc's", Path(nvcc).resolve().parents[1]
    yield "pip's", _pip_dir() / f"cu{_cuda_major()}"
    yield "system's", Path("/usr/local/cuda")
    for home in sorted(Path("/usr/local").glob("cuda-*"), reverse=True):
        yield "system's", home
    yield "system's", Path("/opt/cuda")


def _pip_dir() -> Path:
    return Path(torch.__file__).parents[1] / "nvidia"


def _cuda_major() -> str:
    return (torch.version.cuda or "").split(".")[0]


def _reject_cuda_home(home: Path) -> str:
    """Say why ``home`` is no toolkit for this torch; empty if it is one."""
    if not home.is_dir():
        return "does not exist"
    if not (home / "bin" / "nvcc").is_file():
        return "no bin/nvcc"
    if _cuda_dir(home, "include", "cuda_runtime.h") is None:
        return "no include/cuda_runtime.h"
    release = re.search(r"release ((\d+)\.\d+)", _output_of(f"{home}/bin/nvcc", "--version"))
    if release is None:
        return "bin/nvcc does not run"
    if release[2] != _cuda_major():
        return f"is CUDA {release[1]}, but torch is built for {torch.version.cuda}"
    return ""


def _cuda_dir(home: Path, kind: str, pattern: str) -> Path | None:
    """Find the toolkit's ``include`` or ``lib`` folder; conda has it under ``targets``."""
    folders = [home / kind, home / f"{kind}64", *home.glob(f"targets/*/{kind}")]
    return next((folder for folder in folders if any(folder.glob(pattern))), None)


def _output_of(*command: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
        return done.stdout + done.stderr
    return ""


def _cuda_archs() -> tuple[str, ...]:
    """Return what kernels are compiled for, as in "90" or "100+PTX"."""
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        names = listed.replace(";", " ").split()
        for name in names:
            if not re.fullmatch(r"\d+\.\d[a-z]?(\+PTX)?", name):
                raise BuildError(f"TORCH_CUDA_ARCH_LIST: {name!r} is not like 9.0 or 9.0+PTX")
        return tuple(sorted({name.replace(".", "") for name in names}))
    if not torch.cuda.is_available():
        raise BuildError("no GPU says what to compile for; set TORCH_CUDA_ARCH_LIST, as in 9.0")
    devices = range(torch.cuda.device_count())
    return tuple(sorted({"{}{}".format(*torch.cuda.get_device_capability(i)) for i in devices}))


@functools.cache
def _cpu_identity() -> str:
    """Return what ``-march=native`` depends on."""
    keep = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
        return "\n".join(line for line in first.splitlines() if line.startswith(keep))
    return platform.processor() or platform.machine()


def _source_dir() -> Path | None:
    """Return the folder of the native sources; a folder cuda/ may also be NVIDIA's package."""
    for parent in (Path(__file__).parent, Path(__file__).resolve().parent):
        for name in ("cuda", "fusedopt_cuda"):
            if (parent / name / "fusedopt.h").is_file():
                return parent / name
    return None


def _cache_dir() -> Path:
    if chosen := os.environ.get("FUSEDOPT_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = root or os.path.expanduser("~/.cache")
    # Without a home, "~" stays as it is.
    return _fallback_dir() if root[0] == "~" else Path(os.path.abspath(root), "fusedopt")


def _fallback_dir() -> Path:
    return Path(tempfile.gettempdir(), f"fusedopt-{os.getuid()}")


def _may_write(folder: Path) -> bool:
    """Say whether ``folder`` can be written, or made."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(existing, os.W_OK)


def _is_trusted(folder: Path) -> bool:
    """Say whether ``folder`` was named by the user or, in the shared /tmp, can only be ours."""
    if folder != _fallback_dir():
        return True
    with suppress(OSError):
        info = os.lstat(folder)
        mode = info.st_mode
        return stat.S_ISDIR(mode) and info.st_uid == os.getuid() and not mode & 0o022
    return False


def _writable_cache() -> Path:
    reasons = []
    for folder in (_cache_dir(), _fallback_dir()):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        if _is_trusted(folder):
            if reasons:
                _warn_once(f"fusedopt cannot write its cache ({reasons[0]}); it uses {folder}")
            return folder
        reasons.append(f"{folder}: others can write it")
    raise BuildError(
        f"no folder to build in ({'; '.join(reasons)}); set FUSEDOPT_CACHE_DIR to a writable one"
    )


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Let one process or thread in. The lock dies with its process, so none can be stale."""
    import fcntl

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another build (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # A file system without locks: at worst the same thing is built twice.
            _log.info("no file locks in %s", path.parent)
        try:
            yield
        finally:  # Said aloud, since a process forked meanwhile keeps the file open.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def _plain_names(*paths: Path) -> Iterator[list[str]]:
    """Give ``paths`` names that need no quotes: neither torch's build file nor nvcc quotes all."""
    plain = re.compile(r"[A-Za-z0-9_./+@-]+")
    if all(plain.fullmatch(str(path)) for path in paths):
        yield [str(path) for path in paths]
        return
    root = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(dir=root if plain.fullmatch(root) else "/tmp") as links:
        names = [f"{links}/{i}" for i in range(len(paths))]
        for path, name in zip(paths, names, strict=True):
            os.symlink(path, name)
        yield names


def _is_whole(path: Path) -> bool:
    """Say whether an ELF file reaches to its end; loading a truncated one can kill the process."""
    with suppress(OSError, struct.error), open(path, "rb") as file:
        head = file.read(64)
        (table,) = struct.unpack_from("<Q", head, 40)
        size, count = struct.unpack_from("<2H", head, 58)
        return head[:4] == b"\x7fELF" and path.stat().st_size >= table + size * count
    return False


def _torch_builder() -> Any:
    """Return a private copy of ``torch.utils.cpp_extension``.

    Its CUDA_HOME is a guess that has to be corrected, its memory of names makes a load() after a
    failed one skip the compiler, and neither may be changed under somebody else's build.
    """
    original = importlib.util.find_spec("torch.utils.cpp_extension")
    assert original is not None
    name = "torch.utils.cpp_extension_of_fusedopt"
    logging.getLogger(name).setLevel(logging.INFO if _verbose() else logging.ERROR)
    with _builder_lock:  # it imports setuptools, which does not like several threads
        return _import_file(name, original.origin)


def _import_file(name: str, path: str | Path | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _verbose() -> bool:
    return os.environ.get("FUSEDOPT_VERBOSE", "0") not in ("", "0")


class _Binary(NamedTuple):
    """One shared library: what it is made of, where it lies, how it is built and loaded."""

    folder: Path
    name: str
    backend: str
    sources: tuple[str, ...]
    defines: tuple[str, ...]
    python_module: bool

    @classmethod
    def is_prebuilt(cls, name: str, backend: str, source: str) -> bool:
        """Say whether a module can be loaded without any tool."""
        folder = _source_dir() if sys.platform.startswith("linux") else None
        return bool(folder and cls(folder, name, backend, (source,), (), True).find())

    @property
    def by_nvcc(self) -> bool:
        return self.backend == "cuda" and not self.python_module

    def flags(self) -> list[str]:
        if self.by_nvcc:
            flags = ["-O3", "-lineinfo", "-std=c++17", "-fmad=false"]
            flags += ["-Xcompiler=-fvisibility=hidden"]
        elif self.python_module:
            flags = ["-O2", "-fvisibility=hidden"]
            # -fopenmp is for at::parallel_for; libgomp is the one that torch itself has loaded.
            flags += ["-DFUSEDOPT_CUDA=1"] if self.backend == "cuda" else ["-fopenmp"]
        else:
            flags = ["-O3", "-march=native", "-ffp-contract=fast"]
            flags += ["-fno-math-errno", "-fno-trapping-math"]
            flags += ["-fvisibility=hidden"]
        return flags + [shlex.quote(f"-D{define}") for define in self.defines]

    def archs(self) -> tuple[str, ...]:
        return _cuda_archs() if self.by_nvcc else ()

    def stem(self) -> str:
        """Name the file by all that its content depends on, except architectures (see `find`).

        The compiler's version is left out: a machine without one must find what was built.
        """
        flags = self.flags()
        parts = [torch.__version__, str(torch.version.cuda), *flags, *self.sources]
        parts.append(sysconfig.get_config_var("EXT_SUFFIX") or sys.version)
        parts += [_cpu_identity()] if "-march=native" in flags else []
        digest = hashlib.sha256("\0".join(parts).encode())
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".cu", ".cuh", ".h", ".cpp"):
                content = path.read_bytes()
                digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
        return f"fusedopt_{self.name}_{self.backend}_{digest.hexdigest()[:16]}"

    def find(self) -> Path | None:
        """Return the finished file if there is one, built for at least our architectures."""
        stem, archs = self.stem(), set(self.archs())
        places = [self.folder / "prebuilt", _cache_dir()]
        if not _may_write(_cache_dir()):  # then this is where it was built
            places.append(_fallback_dir())
        for place in places:
            for path in sorted(place.glob(f"{stem}*.so")) if _is_trusted(place) else ():
                if archs <= set(path.name.split(".")[1:-1]) and _is_whole(path):
                    return path
        return None

    def load(self) -> ModuleType | ctypes.CDLL:
        try:
            path = self.find() or self.build()
        except OSError as error:
            raise BuildError(self.describe(f"cannot be built: {error}")) from error
        try:
            if self.python_module:
                return _import_file(path.stem, path)
            return ctypes.CDLL(str(path))
        except (ImportError, OSError) as error:
            text = f"does not load; delete {path} to build it anew: {error}"
            raise BuildError(self.describe(text)) from error

    def build(self) -> Path:
        if reason := _missing(self.backend):
            raise BuildError(self.describe(f"cannot be built: {reason}"))
        stem, cache = self.stem(), _writable_cache()
        with _file_lock(cache / f"{stem}.lock"):
            if path := self.find():  # Built by somebody else while we waited.
                return path
            for left_by_killed_build in cache.glob(f"{stem}.build-*"):
                shutil.rmtree(left_by_killed_build, ignore_errors=True)
            _log.info("compiling %s for %s into %s", self.name, self.backend, cache)
            with tempfile.TemporaryDirectory(
                prefix=f"{stem}.build-", dir=cache, ignore_cleanup_errors=True
            ) as work:
                try:
                    built = self.compile(stem, Path(work))
                except Exception as error:
                    log = cache / f"{stem}.log"
                    log.write_text(str(error), errors="replace")
                    raise BuildError(self.explain(str(error), log)) from error
                if self.stem() != stem:
                    raise BuildError(self.describe("changed while it was compiled; start again"))
                path = cache / ".".join([stem, *self.archs(), "so"])
                os.replace(built, path)
        return path

    def compile(self, stem: str, work: Path) -> Path:
        """Compile into ``work``; nothing else is touched."""
        flags, ldflags, include = self.flags(), ["-shared", "-Wl,--as-needed"], None
        home = _find_cuda_home() if self.backend == "cuda" else None
        if self.python_module:
            flags.append(f"-DTORCH_EXTENSION_NAME={stem}")
            ldflags.append("-ltorch_python")
        for arch in self.archs():
            number, _, ptx = arch.partition("+")
            codes = ("sm", "compute") if ptx else ("sm",)
            flags += [f"-gencode=arch=compute_{number},code={code}_{number}" for code in codes]
        if self.by_nvcc and "CXX" in os.environ and "CC" not in os.environ:
            flags.append(f"-ccbin={shlex.quote(os.environ['CXX'])}")
        with _plain_names(self.folder, work, home or work) as (source_name, work_name, home_name):
            if home is not None:
                include = _cuda_dir(Path(home_name), "include", "cuda_runtime.h")
                # pip's toolkit has libcudart.so.13, but not the name that the linker looks for.
                for place in (home, _pip_dir() / f"cu{_cuda_major()}", _pip_dir() / "cuda_runtime"):
                    if lib := _cuda_dir(place, "lib", "libcudart.so*"):
                        os.symlink(min(lib.glob("libcudart.so*")), work / "libcudart.so")
                        break
                ldflags += ["-L.", "-lcudart", "-lc10_cuda"]
            builder = _torch_builder()
            builder.CUDA_HOME = home_name
            builder.TORCH_LIB_PATH = shlex.quote(builder.TORCH_LIB_PATH)
            # "Standalone" compiles without loading, which load() does not do safely in threads.
            built = builder.load(
                name=stem,
                sources=[f"{source_name}/{source}" for source in self.sources],
                extra_cflags=None if self.by_nvcc else flags,
                extra_cuda_cflags=flags,
                extra_ldflags=ldflags,
                extra_include_paths=[str(include)] if include else [],
                build_directory=work_name,
                verbose=_verbose(),
                with_cuda=self.by_nvcc,
                is_python_module=False,
                is_standalone=True,
            )
        return work / Path(built).name

    def describe(self, problem: str) -> str:
        return (
            f"fusedopt: {self.name} ({self.backend}) of {self.folder} {problem}\n"
            "FUSEDOPT_BACKEND=torch goes on without kernels."
        )

    def explain(self, output: str, log: Path) -> str:
        """Make a message out of what the compilers printed."""
        lines = [line.strip()[:300] for line in output.splitlines() if line.strip()] or [""]
        bad = re.compile(r"error\s*:|fatal\s*:|cannot find|not found|undefined reference|Killed")
        first = next((line for line in lines if bad.search(line)), lines[0])
        fix = next(fix for pattern, fix in _FIXES.items() if re.search(pattern, output))
        parts = ["did not compile:", first, "...", *lines[-6:]]
        return self.describe("\n  ".join(parts) + f"\nFull log: {log}\nFix: {fix}.")


def _load(
    name: str,
    backend: str,
    sources: tuple[str, ...],
    defines: tuple[str, ...] = (),
    *,
    python_module: bool,
) -> ModuleType | ctypes.CDLL:
    """Return ``sources`` compiled with ``defines`` ("NAME=VALUE"), a failure cached like a success.

    ``python_module``: a pybind11 module named TORCH_EXTENSION_NAME; else a plain C library.
    """
    folder = _source_dir()
    if folder is None:
        raise BuildError(_missing(backend))
    binary = _Binary(folder, name, backend, sources, defines, python_module)
    with _lock:
        future = _loaded.get(binary)
        first = future is None
        if future is None:
            future = _loaded[binary] = Future()
    if first:
        try:
            future.set_result(binary.load())
        except BaseException as error:
            if not isinstance(error, BuildError):  # An interrupt or a bug may pass: try again.
                del _loaded[binary]
            future.set_exception(error)
    return future.result()


# ---- Dtypes: how numbers are kept, in PyTorch ---------------------------------------------------


class _Code(NamedTuple):
    """How one number is written; its twin in C++ is the struct `name` in precision.cuh."""

    name: str
    dtype: torch.dtype
    mantissa: int = 23  # explicit bits
    bias: int = 127
    top: int | None = None  # exponent of a block's largest element; None: no block scales

    def is_rotated(self, role: _Role) -> bool:
        """Whether the sign bit, of roots that have none, is the lowest bit of the mantissa."""
        return role.is_square and self.top is not None and self.dtype.itemsize == 1


_F32 = _Code("F32", torch.float32)
_CODES = {
    code.dtype: code
    for code in (
        _F32,
        _Code("BF16", torch.bfloat16, 7),
        _Code("F16", torch.float16, 10, 15, 14),
        _Code("E4M3", torch.float8_e4m3fn, 3, 7, 8),
        _Code("E5M2", torch.float8_e5m2, 2, 15, 14),
    )
}
_DTYPE_NAMES: dict[Any, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    torch.uint8: torch.float8_e4m3fn,  # TransformerEngine's name for fp8
    None: torch.float32,
}
_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALING = ("fp8_scale", "fp8_amax", "fp8_scale_inv")
_FP32_LARGEST = torch.finfo(torch.float32).max
_FP8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_REMAINDERS = {torch.int16: "Remainder16", torch.int8: "Remainder8"}
_BLOCK = 256  # elements that share one scale, kScaleBlock in C++
_SMALL = 4096  # tensors of fewer elements keep fp32 states whatever was asked
_MASK = 0xFFFFFFFF
_SALT = 0x9E3779B9
_FACTORS = (1, 0xF80FF809, 0xEEE93E3D, 0x78230551)
_WEIGHT_STREAM = 3  # random stream of the weight; state n draws stream n


class _Role(Enum):
    """What a state means decides how it is kept when its dtype is narrow (Role in C++)."""

    MOMENT = auto()
    SECOND_MOMENT = auto()  # kept as its square root, never rounded to zero
    MAXIMUM = auto()  # likewise, but rounded to nearest
    WEIGHT = auto()

    @property
    def is_square(self) -> bool:
        return self in (_Role.SECOND_MOMENT, _Role.MAXIMUM)

    @property
    def forgets(self) -> bool:
        """Or else scales are powers of two, for values must not be rounded anew all the time."""
        return self in (_Role.MOMENT, _Role.SECOND_MOMENT)


def _fold_product(x: Tensor, factor: int) -> Tensor:
    product = x * factor  # 64 bits, of which int64 wraps only the sign
    return ((product >> 32) ^ product) & _MASK


def _hash32(x: Tensor) -> Tensor:
    """Hash of an int64 tensor of 32-bit numbers."""
    return _fold_product(_fold_product(x ^ 0x243F6A88, 0x9E3779B1) ^ 0x85A308D3, 0xC2B2AE3D)


_Noise = Callable[[int], Tensor]  # number of elements -> 16 random bits per element, int32


def _random(seed: int, step: Tensor, stream: int, numel: int) -> Tensor:
    """Random in precision.cuh; the same bits in every backend."""
    start = _hash32(torch.tensor(seed & _MASK, device=step.device))
    key = _hash32((start + step.long()) & _MASK)
    index = torch.arange(-(-numel // 2), device=step.device)
    draw = _hash32((key ^ index ^ (index >> 32) * _SALT) & _MASK) * _FACTORS[stream] & _MASK
    halves = [draw & 0xFFFF, draw >> 16]
    return torch.stack(halves[::-1] if stream % 2 else halves, dim=1).flatten()[:numel].int()


def _per_block(flat: Tensor) -> Tensor:
    """A flat tensor as rows of one block each, padded with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)


def _decode(code: _Code, role: _Role, raw: Tensor, scale: Tensor | None) -> Tensor:
    """Flat fp32 values of a flat stored tensor."""
    values = _decode_rotated(code, raw) if code.is_rotated(role) else raw.float()
    if code.top is None:
        return values
    assert scale is not None
    values = (_per_block(values) * scale[:, None]).flatten()[: raw.numel()]
    return values.square() if role.is_square else values


def _encode(
    code: _Code, role: _Role, values: Tensor, noise: _Noise
) -> tuple[Tensor, Tensor | None]:
    """Flat stored tensor of flat fp32 values, and the block scales if it has any."""
    scale = None
    x = values
    rotated = code.is_rotated(role)
    if rotated:
        code = code._replace(mantissa=code.mantissa + 1)
    if code.top is not None:
        x = values.sqrt() if role.is_square else values
        blocks = _per_block(x)
        amax = blocks.abs().where(blocks.isfinite(), 0).amax(dim=1)
        if not role.forgets:
            half_a_step = 1 << (22 - code.mantissa)  # which may round it up to the next power
            power = ((amax.view(torch.int32) + half_a_step) & 0x7F800000).clamp(max=0x7F000000)
            amax = power.view(torch.float32)
        scale = amax * 2.0 ** (-code.top if role.forgets else 1 - code.top)
        scale = scale.clamp(min=2.0**-126).where(amax > 0, 1)
        inverse = 1 / scale
        if role is not _Role.MAXIMUM:  # a little more than 1, as in Minifloat::stochastic
            inverse = inverse * (1 + 2.0**-21)
        x = (blocks * inverse[:, None]).flatten()[: values.numel()]
        x = x.where(x.isfinite(), torch.nan)
    if code.dtype is torch.float32:
        return x, scale
    if role is not _Role.MAXIMUM:
        raw = _round_stochastic(code, x, noise(x.numel()), has_sign=not rotated)
    elif rotated:
        raw = _round_nearest(code, x)
    else:
        raw = x.to(code.dtype)
    if role.is_square:
        bits = raw.view(_INT_OF[raw.element_size()])
        bits = torch.where((bits == 0) & (values > 0), 1, bits)
        raw = (_rotated(bits, 1) if rotated else bits).view(raw.dtype)
    return raw, scale


_INT_OF = {1: torch.uint8, 2: torch.int16}


def _rotated(codes: Tensor, to_the_right: int) -> Tensor:
    codes = codes.int()
    return (codes >> to_the_right | codes << (8 - to_the_right)).to(torch.uint8)


def _decode_rotated(code: _Code, raw: Tensor) -> Tensor:
    """fp32 values of an fp8 tensor whose sign bit is the lowest bit of the mantissa."""
    bits, width = _rotated(raw.view(torch.uint8), 7).int(), code.mantissa + 1
    exponent, mantissa = bits >> width, bits & (1 << width) - 1
    mantissa = mantissa + (exponent > 0) * (1 << width)
    values = torch.ldexp(mantissa.float(), exponent.clamp(min=1) - (code.bias + width))
    return values.where(raw.float().isfinite(), raw.float().abs())


def _at_bottom(code: _Code, x: Tensor) -> Tensor:
    """Bits of |x| times a power of two that makes this format's exponents the smallest of fp32.

    Dropping bits then rounds what is subnormal, too.
    """
    magnitude = x.abs()
    normal = magnitude.view(torch.int32) - ((127 - code.bias) << 23)
    subnormal = (magnitude * 2.0 ** (code.bias + 22)).round().int()
    return normal.where(magnitude >= 2.0 ** (1 - code.bias), subnormal).long()


def _round_nearest(code: _Code, x: Tensor) -> Tensor:
    """`nearest` of a Minifloat without a sign: raw, before its bits are rotated."""
    drop = 23 - code.mantissa
    bits = _at_bottom(code, x)
    bits = (bits + (1 << (drop - 1)) - 1 + (bits >> drop & 1)) >> drop
    largest = 0xFD if code.dtype is torch.float8_e4m3fn else 0xF7
    return bits.clamp(max=largest).where(~x.isnan(), 0xFE).to(torch.uint8).view(code.dtype)


def _round_stochastic(code: _Code, x: Tensor, random: Tensor, has_sign: bool = True) -> Tensor:
    """`stochastic` of BF16 and Minifloat in precision.cuh, on a flat fp32 tensor."""
    bits = x.view(torch.int32)
    if code.top is None:
        rounded = (bits + random) >> 16
        return rounded.to(torch.int16).view(code.dtype).where(~x.isnan(), torch.nan)
    at_bottom = _at_bottom(code, x)
    width = 8 * code.dtype.itemsize
    kept = 0xFF80 if width == 16 else 0xFFFE if code.mantissa == 4 else 0xFFFF
    noise = (random.long() & kept) << (0 if width == 16 else 8)
    raw = ((at_bottom << (9 + code.mantissa - width)) + noise) >> (32 - width)
    if has_sign:
        raw = raw | (bits < 0).long() << (width - 1)
    nan = 0x7E00 if width == 16 else 0x7F if has_sign else 0xFE
    raw = raw.where(~x.isnan(), nan)
    return raw.to(_INT_OF[width // 8]).view(code.dtype)


def _join(half: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a flat bf16 parameter and its remainder (int16: exact; int8: 24 bits)."""
    missing = 16 - 8 * remainder.element_size()
    bits = (half.view(torch.int16).int() << 16) + (remainder.int() << missing)
    return bits.view(torch.float32)


def _split(values: Tensor, dtype: torch.dtype, noise: _Noise) -> tuple[Tensor, Tensor]:
    """A flat fp32 tensor as bf16, rounded to nearest (ties away from zero), and what is missing."""
    missing = 16 - 8 * dtype.itemsize
    bits = values.view(torch.int32)
    bits = bits.where(~values.isnan(), 0x7FC00000)
    if missing:
        bits = bits + (noise(values.numel()) >> (16 - missing))
    half = (bits + 0x8000) >> 16
    remainder = (bits - (half << 16)) >> missing
    return half.to(torch.int16).view(torch.bfloat16), remainder.to(dtype)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory without gap or overlap."""
    expected = 1
    for stride, size in sorted(
        (s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1
    ):
        if stride != expected and tensor.numel() > 0:
            return False
        expected *= size
    return True


def _layout(tensor: Tensor) -> list[int]:
    """The strides that mean anything."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


def _blocks(param: Tensor) -> int:
    return -(-param.numel() // _BLOCK)


def _has_shape_of_param(name: str) -> bool:
    """Whether what a state keeps under this name has one element per element of its parameter."""
    return name != "step" and name not in _SCALING and not name.endswith("_scale")


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def _as_code(
    dtype: Any, option: str, allowed: Collection[torch.dtype] = _CODES.keys()
) -> torch.dtype:
    known = isinstance(dtype, str | torch.dtype | None)
    code = _DTYPE_NAMES.get(dtype, dtype) if known else None
    if code in allowed:
        return cast(torch.dtype, code)
    names = [name for name, of in _DTYPE_NAMES.items() if isinstance(name, str) and of in allowed]
    raise ValueError(
        f"{option} must be None, one of {', '.join(map(repr, names))}, or the torch.dtype of one "
        f"of them, got {dtype!r}"
    )


def _unscaled(stored: Tensor, scale: Tensor | None, role: _Role) -> Tensor:
    """The fp32 values of a stored dense tensor, in its shape and layout."""
    values = torch.empty_like(stored, dtype=torch.float32)
    code = _CODES.get(stored.dtype, _F32)
    if scale is None:  # a plain tensor, also of another library
        return values.copy_(stored)
    _flat(values).copy_(_decode(code, role, _flat(stored), scale))
    return values


class _Packed(NamedTuple):
    """An fp8 tensor as bytes: pickle alone, unlike torch.save, cannot read fp8 back."""

    data: Tensor
    dtype: torch.dtype


def _pack(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _FP8_LARGEST:
        return _Packed(value.view(torch.uint8), value.dtype)
    return value


def _unpack(value: Any) -> Any:
    return value.data.view(value.dtype) if isinstance(value, _Packed) else value


# ---- State that knows when somebody puts another tensor into it --------------------------------


class _Changes:
    """Counts what is put into a state or taken out, and tells the optimizer, if it has one."""

    def __init__(self, optimizer: _FusedOptimizer | None) -> None:
        self.count = 0
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)

    def note(self) -> None:
        self.count += 1
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None and not optimizer._is_preparing:
            optimizer._forget_plans()  # they would keep what was there alive


class _ParamState(dict[str, Any]):
    """The state of one parameter."""

    def __init__(self, changes: _Changes, *args: Any) -> None:
        self.changes = changes
        super().__init__(*args)

    def __reduce__(self) -> Any:  # a copy is nobody's state
        return dict, (dict(self),)


class _State(defaultdict[Any, Any]):
    """The states of all parameters, each a _ParamState."""

    def __init__(
        self,
        states: Mapping[Any, Any] | None = None,
        optimizer: _FusedOptimizer | None = None,
    ) -> None:
        self.changes = _Changes(optimizer)
        super().__init__()
        for key, value in (states or {}).items():
            self[key] = value

    def copy(self) -> Any:
        return defaultdict(dict, self)

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def __missing__(self, key: Any) -> _ParamState:
        self[key] = {}
        made: _ParamState = self[key]
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        self.changes.note()
        super().__setitem__(key, _ParamState(self.changes, value) if type(value) is dict else value)


def _counted(name: str, of: type) -> Callable[..., Any]:
    method = getattr(of, name)

    @functools.wraps(method)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.note()
        return method(self, *args, **kwargs)

    return change


for _name in ("__delitem__", "__ior__", "pop", "popitem", "clear", "update", "setdefault"):
    setattr(_ParamState, _name, _counted(_name, dict))
    setattr(_State, _name, _counted(_name, dict))
_ParamState.__setitem__ = _counted("__setitem__", dict)  # type: ignore[method-assign]


# ---- FP8 parameters ------------------------------------------------------------------------------


class _Weight(NamedTuple):
    """The tensor that holds a parameter's numbers, and its delayed scaling if that is fp8."""

    data: Tensor
    scaling: tuple[Tensor, Tensor, Tensor] | None = None  # scale, amax, scale_inv: one number each
    largest: float = 0.0  # of the dtype, where choosing the scale is ours


def _weight_of(param: Tensor) -> _Weight:
    """Where the numbers of a parameter lie."""
    quantizer = getattr(param, "_quantizer", None)
    if quantizer is not None and hasattr(param, "_scale_inv"):  # TransformerEngine's Float8Tensor
        te: Any = param
        dtype = torch.float8_e5m2 if "E5M2" in str(te._fp8_dtype) else torch.float8_e4m3fn
        return _Weight(te._data.view(dtype), (quantizer.scale, quantizer.amax, te._scale_inv))
    if param.dtype in _FP8_LARGEST and hasattr(param, "fp8_scale"):
        scaling = (param.fp8_scale, param.fp8_amax, param.fp8_scale_inv)  # type: ignore[attr-defined]
        return _Weight(param, scaling, _FP8_LARGEST[param.dtype])
    return _Weight(param)


def _parts(param: Tensor) -> tuple[Any, ...]:
    """The tensors that make up an fp8 parameter."""
    return (getattr(param, "_data", None), *(_weight_of(param).scaling or ()))


class _Fp8Parameter(torch.nn.Parameter):
    """A parameter whose copies keep its scaling."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copied = _Fp8Parameter(self.detach().clone(), self.requires_grad)
            for name in _SCALING:
                setattr(copied, name, deepcopy(getattr(self, name), memo))
        return memo[id(self)]


@torch.no_grad()
def fp8_parameter(tensor: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.nn.Parameter:
    """An fp8 parameter with per-tensor delayed scaling, for use with a master weight.

    Beside the stored numbers it carries three 0-dim fp32 tensors: `fp8_scale` (stored = value *
    scale), `fp8_amax` (largest magnitude of the value at the last step) and `fp8_scale_inv`, the
    factor that torch._scaled_mm wants. Each step takes its scale from the amax of the step before.

    Args:
        tensor: values of any float dtype and shape; an infinite one becomes the largest finite
            one, which a step's scale goes by.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        A parameter of that dtype and of the tensor's shape and device.

    Raises:
        TypeError, ValueError: no tensor, or another dtype.
    """
    if dtype not in _FP8_LARGEST:
        raise ValueError(f"dtype must be one of {_listed(_FP8_LARGEST)}, got {dtype}")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"an fp8 parameter is made from a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        raise TypeError(
            "an fp8 parameter is made from dense numbers of a float dtype, got "
            f"{tensor.dtype}, {tensor.layout}"
        )
    values = tensor.detach().float()
    finite = torch.where(values.isfinite(), values.abs(), 0.0)
    amax = finite.amax() if finite.numel() else finite.new_zeros(())
    largest = _FP8_LARGEST[dtype]
    scale = torch.where(amax > 0, largest / amax, 1.0).clamp(max=_FP32_LARGEST)
    param = _Fp8Parameter((values * scale).clamp(-largest, largest).to(dtype))
    param.fp8_scale, param.fp8_amax, param.fp8_scale_inv = scale, amax, 1 / scale  # type: ignore[attr-defined]
    return param


def fp8_dequantize(param: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a parameter made by fp8_parameter, in another dtype, for a forward pass.

    Raises:
        TypeError: the parameter has no scale.
    """
    scale_inv: Tensor | None = getattr(param, "fp8_scale_inv", None)
    if scale_inv is None:
        raise TypeError("only what fp8_parameter() made can be dequantized: there is no scale")
    return (param.detach().float() * scale_inv).to(dtype)


# ---- A plan: what the kernels need to know, made once per set of tensors -----------------------


class _Signature(NamedTuple):
    """What one kernel is compiled for."""

    rule: str
    param: str
    grad: str
    master: str
    stochastic: bool
    states: tuple[str, ...]

    def defines(self) -> tuple[str, ...]:
        """Compiler definitions that step.cu reads."""
        return (
            f"FUSEDOPT_RULE={self.rule}",
            f"FUSEDOPT_PARAM={self.param}",
            f"FUSEDOPT_GRAD={self.grad}",
            f"FUSEDOPT_MASTER={self.master}",
            f"FUSEDOPT_STOCHASTIC={str(self.stochastic).lower()}",
            *(f"FUSEDOPT_STATE{i}={code}" for i, code in enumerate(self.states)),
        )


class _Row(NamedTuple):
    """One parameter of a plan, its group's number, and its gradient's dtype; None: only watched."""

    param: Tensor
    group: int
    grad_dtype: torch.dtype | None


class _Scaling(NamedTuple):
    """What a GradScaler asks of a step, on the device."""

    grad_scale: Tensor | None  # to divide by
    found_inf: Tensor | None  # not zero: skip the step
    is_checked: bool = True  # or else the norm of the gradients has to find out
    record: dict[str, Any] | None = None  # of a scaler that was handed to step()


class _DevicePlan(NamedTuple):
    """The plan of one device, and where gradients come from if not from p.grad."""

    backend: str
    device: torch.device
    plan: Any
    sources: list[tuple[Tensor, dict[str, Any]]] | None


class _Form(NamedTuple):
    """How the states and the master of one parameter are kept."""

    states: tuple[tuple[str, _Code, _Role], ...]
    master: _Code | torch.dtype | None  # a remainder's integer dtype; None: no master
    stochastic: bool = False  # the write of a parameter without master


def _load_kernels(backend: str, signatures: Sequence[_Signature]) -> tuple[Any, list[int]]:
    """The bindings and the address of each signature's kernels, built side by side if need be."""

    def kernels(signature: _Signature) -> int:
        name = "_".join((signature.rule, signature.param, signature.grad, signature.master))
        name = "_".join((name, *signature.states)).lower()
        library = _load(
            name, backend, (_STEP_SOURCES[backend],), signature.defines(), python_module=False
        )
        library.fusedopt_kernels.restype = ctypes.c_void_p
        return int(library.fusedopt_kernels())

    with ThreadPoolExecutor(max_workers=1 + len(signatures)) as pool:
        bindings = pool.submit(_load, "bindings", backend, ("bindings.cpp",), python_module=True)
        addresses = list(pool.map(kernels, signatures))
        return bindings.result(), addresses


_STEP_SOURCES = {"cuda": "step.cu", "cpu": "step.cpp"}
_GRADIENT_SOURCES = {"cuda": "gradients.cu", "cpu": "gradients.cpp"}


def _load_gradient_kernels(backend: str) -> int:
    """The address of the kernels for the norm of gradients."""
    source = _GRADIENT_SOURCES[backend]
    library = _load("gradients", backend, (source,), python_module=False)
    library.fusedopt_gradient_kernels.restype = ctypes.c_void_p
    return int(library.fusedopt_gradient_kernels())


class _TorchPlan:
    """The pure PyTorch path: what a compiled plan does, one tensor after the other."""

    captured = False
    has_norm = True

    @property
    def gathered(self) -> int:
        return sum(grad is not None for grad in self.grads)

    def __init__(
        self,
        optimizer: _FusedOptimizer,
        device: torch.device,
        rows: list[_Row],
        forms: dict[Tensor, _Form],
    ) -> None:
        self.optimizer = optimizer
        self.device = device
        self.rows = rows
        self.forms = forms
        # Kept alive, so that no other object can get their ids.
        self.groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self.structure = self._read_structure(optimizer.param_groups)
        self.layouts = self._read_layouts()
        self.grads: list[Tensor | None] = []

    def _read_structure(self, groups: list[dict[str, Any]]) -> list[Any]:
        values = [group[key] for group in groups for key in self.optimizer._structure]
        who = [(id(group), *map(id, group["params"])) for group in groups]
        return [bool(v) if isinstance(v, int | float) else v for v in values] + who

    def _read_layouts(self) -> list[Any]:
        planned = [row.param for row in self.rows if row.grad_dtype is not None]
        tensors = [_weight_of(param).data for param in planned]
        tensors += [
            value
            for param in planned
            for value in self.optimizer.state.get(param, {}).values()
            if isinstance(value, Tensor)
        ]
        return [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether groups and parameters still are what the plan was made for."""
        return (
            self._read_structure(groups) == self.structure and self._read_layouts() == self.layouts
        )

    def gather(self, grads: list[Tensor | None] | None) -> bool:
        """Read the gradients; False if the plan no longer fits."""
        self.grads = [row.param.grad for row in self.rows] if grads is None else grads
        return all(
            grad is None
            or (
                grad.layout is torch.strided
                and not is_traceable_wrapper_subclass(grad)
                and grad.dtype == row.grad_dtype
                and grad.device == row.param.device
                and grad.shape == row.param.shape
            )
            for row, grad in zip(self.rows, self.grads, strict=True)
        )

    def step(
        self,
        groups: list[dict[str, Any]],
        max_grad_norm: float | None,
        grad_norm: Tensor | None,
    ) -> bool:
        """Gather and launch; False, with nothing changed, if the plan no longer fits."""
        fits = max_grad_norm is None and self.fits(groups) and self.gather(None)
        if fits:
            self.launch(groups, None, None, None, 0.0, None)
        return fits

    @torch.no_grad()
    def norm_sq(self, groups: list[dict[str, Any]], found_inf: Tensor | None) -> Tensor:
        """The sum of squares of what was gathered, one number; found_inf is set to one or zero."""
        grads = [grad for grad in self.grads if grad is not None]
        if found_inf is not None:
            found_inf.zero_()
            for grad in grads:
                found_inf.masked_fill_(~grad.isfinite().all(), 1.0)
        return _sum_of_squares(grads, self.device)

    @torch.no_grad()
    def launch(
        self,
        groups: list[dict[str, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        norm_sq: Tensor | None,
        max_grad_norm: float,
        grad_norm: Tensor | None,
    ) -> None:
        """Update every parameter that has a gradient."""
        groups = [self._as_scalars(group) for group in groups]
        factor: Tensor | float = 1.0 if grad_scale is None else 1 / grad_scale
        if norm_sq is not None:
            norm = norm_sq.sqrt() * factor
            if grad_norm is not None:
                grad_norm.copy_(norm.reshape(()))
            factor = factor * _clip_factor(norm, max_grad_norm).float()
        for row, grad in zip(self.rows, self.grads, strict=True):
            if grad is not None:
                self._update(row.param, grad, groups[row.group], factor, found_inf)
        self.grads = []

    def _as_scalars(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group whose hyperparameters broadcast as numbers do; ValueError if they cannot."""
        return {key: _as_scalar(group[key], key) for key in self.optimizer._hyperparameters}

    def _update(
        self,
        param: Tensor,
        grad: Tensor,
        group: dict[str, Any],
        factor: Tensor | float,
        found_inf: Tensor | None,
    ) -> None:
        state, form, seed = self.optimizer.state[param], self.forms[param], self.optimizer._seed
        place = _weight_of(param)
        step = state["step"] + 1
        writes = [(state["step"], step)]
        if _layout(grad) != _layout(place.data):
            grad = torch.empty_like(place.data, dtype=grad.dtype).copy_(grad)
        flat_grad = _flat(grad).float() * factor
        if group["maximize"]:
            flat_grad = -flat_grad
        values = [
            _decode(code, role, _flat(state[name]), state.get(f"{name}_scale"))
            for name, code, role in form.states
        ]
        weight, values = self.optimizer._update(
            _read_weight(place, state), flat_grad, values, group, step.double()
        )
        for stream, ((name, code, role), value) in enumerate(zip(form.states, values, strict=True)):
            raw, scale = _encode(code, role, value, partial(_random, seed, step, stream))
            writes.append((_flat(state[name]), raw))
            if scale is not None:
                writes.append((state[f"{name}_scale"], scale))
        noise = partial(_random, seed, step, _WEIGHT_STREAM)
        writes += _write_weight(place, form, state, weight, noise)
        for target, value in writes:
            target.copy_(value if found_inf is None else torch.where(found_inf != 0, target, value))


def _sum_of_squares(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    wide = torch.float64 if device.type != "mps" else torch.float32
    total = torch.zeros(1, dtype=wide, device=device)
    for grad in grads:
        total += grad.to(wide).square().sum()
    return total


def _total(sums: Sequence[Tensor]) -> Tensor:
    """The sum of some sums, on the device of the first."""
    if len(sums) == 1:
        return sums[0]
    return torch.stack([part.to(sums[0].device) for part in sums]).sum(dim=0)


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences have the same objects; tensors would compare their numbers."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _on(device: torch.device, flag: Tensor | None) -> Tensor | None:
    if flag is None or flag.device == device:
        return flag
    return flag.to(device, non_blocking=device.type != "cpu")  # a CPU would read it too early


def _as_scalar(value: Any, name: str) -> Any:
    if name == "betas":
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ValueError(f"betas must be two numbers, got {value!r}")
        return tuple(_as_scalar(part, "each of betas") for part in value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    return _as_number(value, name)


def _in_order(data: Tensor, values: Tensor) -> Tensor:
    """Flat fp32 values in the memory order, and on the device, of a tensor."""
    if values.dtype is torch.float32 and _is_dense(values) and _layout(values) == _layout(data):
        return _flat(values).to(data.device)
    return _flat(torch.empty_like(data, dtype=torch.float32).copy_(values))


def _read_weight(place: _Weight, state: Mapping[str, Any]) -> Tensor:
    """The flat fp32 weight: of the master in whatever form there is one, else of the parameter."""
    data, master = place.data, state.get("master_param")
    if master is not None and master.dtype not in _REMAINDERS:
        scale = state.get("master_param_scale")
        return _in_order(data, _unscaled(master, scale, _Role.WEIGHT))
    if master is not None and data.dtype in (torch.bfloat16, torch.float32):
        flat = _flat(data)
        half = flat.bfloat16()
        if data.dtype is torch.bfloat16 or bool(((half.float() == flat) | half.isnan()).all()):
            if _layout(master) != _layout(data) or master.device != data.device:
                master = torch.empty_like(data, dtype=master.dtype).copy_(master)
            return _join(half, _flat(master))
    # No master, or a remainder whose bf16 half is gone: what the parameter is now is all there is.
    flat = _flat(data).float()
    return flat if place.scaling is None else flat * place.scaling[2]


def _write_weight(
    place: _Weight, form: _Form, state: dict[str, Tensor], weight: Tensor, noise: _Noise
) -> list[tuple[Tensor, Tensor]]:
    """What is to be written where so that parameter and master hold a new fp32 weight."""
    data = _flat(place.data)
    if form.master is None:
        code = _CODES[data.dtype]
        if form.stochastic:
            return [(data, _round_stochastic(code, weight, noise(weight.numel())))]
        return [(data, weight.to(code.dtype))]
    master = _flat(state["master_param"])
    if isinstance(form.master, torch.dtype):
        half, remainder = _split(weight, form.master, noise)
        return [(data, half), (master, remainder)]
    raw, scale = _encode(form.master, _Role.WEIGHT, weight, noise)
    writes = [(master, raw)]
    if scale is not None:  # the parameter is what the master is
        writes.append((state["master_param_scale"], scale))
        weight = _decode(form.master, _Role.WEIGHT, raw, scale)
    if place.scaling is None:
        return [*writes, (data, weight.to(data.dtype))]
    old_scale, old_amax, scale_inv = place.scaling
    fp8_scale, known = old_scale, torch.zeros_like(old_amax)
    if place.largest:
        fp8_scale = torch.where(old_amax > 0, place.largest / old_amax, old_scale)
        fp8_scale = fp8_scale.clamp(max=_FP32_LARGEST)
        writes.append((old_scale, fp8_scale))
    else:
        known = old_amax
    amax = weight.abs().where(weight.isfinite(), 0).amax() if weight.numel() else known
    limit = _FP8_LARGEST[data.dtype]
    stored = (weight * fp8_scale).clamp(-limit, limit).to(data.dtype)
    writes += [(data, stored), (old_amax, amax.maximum(known)), (scale_inv, 1 / fp8_scale)]
    return writes


def _as_number(value: Any, name: str) -> float:
    if isinstance(value, str | bytes | bytearray | None) or (
        isinstance(value, Tensor) and value.numel() != 1
    ):
        raise ValueError(f"{name} must be one number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{name} must be one number, got {value!r}") from None


def _as_switch(value: Any, name: str) -> bool:
    try:
        if not isinstance(value, str | bytes | float) and value in (False, True):
            return bool(value)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers
        pass
    raise ValueError(f"{name} must be True or False, got {value!r}")


def _validate_betas(group: dict[str, Any]) -> None:
    try:
        group["betas"] = beta1, beta2 = tuple(group["betas"])
    except (TypeError, ValueError):
        raise ValueError(f"betas must be two numbers, got {group['betas']!r}") from None
    if not (0 <= _as_number(beta1, "betas[0]") < 1 and 0 <= _as_number(beta2, "betas[1]") < 1):
        raise ValueError(f"betas must lie in [0, 1), got {group['betas']}")


def _check_kinds_of_checkpoint(state_dict: dict[str, Any]) -> None:
    """Raise ValueError unless groups and states are of the kinds that state_dict() returns."""

    def check(value: Any, kind: type | tuple[type, ...], name: str, wanted: str) -> None:
        if not isinstance(value, kind):
            raise ValueError(f"{name} of the checkpoint must be {wanted}, got {value!r:.80}")

    check(state_dict["state"], dict, "state", "a dict")
    check(state_dict["param_groups"], (list, tuple), "param_groups", "a list")
    for i, group in enumerate(state_dict["param_groups"]):
        check(group, dict, f"param_groups[{i}]", "a dict")
        check(group.get("params"), (list, tuple), f"params of group {i}", "a list")
    for key, state in state_dict["state"].items():
        if not isinstance(key, str):
            check(state, dict, f"state {key}", "a dict")


def _backends(plans: Iterable[_DevicePlan]) -> str:
    return "+".join(sorted({made.backend for made in plans}))


def _is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks or a profiler want to see a step; what they need costs more than a step."""
    return bool(
        torch.autograd.profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


# ---- What every fused optimizer shares -----------------------------------------------------------


def _hidden_from_dynamo(function: Any) -> Any:
    """Make torch.compile pass over a function, without importing Dynamo where there is none."""
    hidden = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (hidden if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call


def _plain(method: Any) -> Any:
    """A method of torch's Optimizer that need not be hidden from Dynamo where there is none.

    The decorator that hides it imports Dynamo, which takes seconds, at the first call.
    """
    return method if "torch._dynamo" in sys.modules else getattr(method, "__wrapped__", method)


class _FusedOptimizer(torch.optim.Optimizer):
    """Groups, states, plans and checkpoints; a subclass says what its rule and its states are.

    A subclass gives `_rule`, the name of its struct in update_rules.cuh; `_hyperparameters`, the
    keys of a group in the order of that struct; `_states(group)`; what `_validate(group)` has to
    check of its own; and `_update`, the rule in PyTorch.
    """

    _rule: str
    _state_names: tuple[str, ...]  # of all states that there may be
    _always_has: tuple[str, ...] = ()  # of those, which every parameter has after a step
    _hyperparameters: tuple[str, ...]
    # The keys of a group that decide what is kept: storage, which a checkpoint converts to.
    _modes: tuple[str, ...] = (
        "master_weights",
        "master_weight_dtype",
        "master_weight_bits",
        "store_param_remainders",
        "use_decoupled_grad",
        "stochastic_rounding",
    )
    _switches: tuple[str, ...] = (
        "maximize",
        "capturable",
        "master_weights",
        "store_param_remainders",
        "use_decoupled_grad",
        "stochastic_rounding",
    )
    _structure: tuple[str, ...]  # `_modes` and whatever else makes a plan stale when it changes
    _step_supports_amp_scaling = True
    _is_preparing = False  # a plan of one parameter, by which the plans of others stay
    _last_backend = ""  # that of plans which are no more

    _max_grad_norm: float | None
    grad_norm: Tensor | None  # of the last step, unscaled and before clipping; 0-dim fp32

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` is locals() of a subclass's constructor; most of it is for groups."""
        defaults = {k: v for k, v in arguments.items() if k not in ("self", "__class__")}
        params, seed = defaults.pop("params"), defaults.pop("seed")
        set_grad_none, max_grad_norm = defaults.pop("set_grad_none"), defaults.pop("max_grad_norm")
        if type(seed) is not int or not 0 <= seed <= _MASK:
            raise ValueError(f"seed must be an integer in [0, 2**32), got {seed!r}")
        self._in_backward: _StepInBackward | None = None
        self.max_grad_norm, self.grad_norm = max_grad_norm, None
        self._skipped: Tensor | None = None
        self._found_inf: Tensor | None = None  # where a norm notes it
        self._seed = seed
        self._grad_none = set_grad_none is None or _as_switch(set_grad_none, "set_grad_none")
        self._grad_dtypes: dict[Tensor, torch.dtype] = {}
        self._forget_plans()
        super().__init__(params, defaults)
        self.state = _State(self.state, self)

    def _states(self, group: dict[str, Any]) -> tuple[tuple[str, torch.dtype, _Role], ...]:
        """Name, dtype and role of each state, in the order of the rule's roles."""
        raise NotImplementedError

    def _update(
        self,
        weight: Tensor,
        grad: Tensor,
        states: list[Tensor],
        group: dict[str, Any],
        step: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """The rule on flat fp32 tensors: the new weight and the new states."""
        raise NotImplementedError

    @property
    def max_grad_norm(self) -> float | None:
        """To what the norm of all gradients is clipped; may be set at any time."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not 0 < _as_number(value, "max_grad_norm") < math.inf:
            raise ValueError(f"max_grad_norm must be None, or finite and above 0, got {value}")
        if self._in_backward is not None:
            _reject_in_backward(value)
        self._max_grad_norm = None if value is None else float(value)

    @property
    def backend(self) -> str:
        """The path of the last step: "cuda", "cpu", "torch", or several joined by "+"."""
        single = [made for made, _ in self._single_plans.values()]
        plans = self._plans if self._in_backward is None else single
        return _backends(plans) or self._last_backend

    @property
    def last_step_skipped(self) -> Tensor:
        """Whether a GradScaler skipped the last step that it took part in; 0-dim bool.

        It stays on the device, and is the same tensor from step to step, so a captured graph or a
        schedule can follow it without waiting for it.
        """
        if self._skipped is None:
            params = (param for group in self.param_groups for param in group["params"])
            device = next((param.device for param in params), None)
            self._skipped = torch.zeros((), dtype=torch.bool, device=device)
        return self._skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters start at step 1 while the others go on.

        Args:
            param_group: `params` and any option of the constructor; what is missing is taken from
                the constructor.

        Raises:
            TypeError: a parameter's dtype or layout is unsupported.
            ValueError: an option is out of range.
        """
        _plain(torch.optim.Optimizer.add_param_group)(self, param_group)
        group = self.param_groups[-1]
        try:
            self._validate(group)
            for i, param in enumerate(group["params"]):
                self._check_param(
                    param, f"parameter {i} of group {len(self.param_groups) - 1}", group
                )
        except Exception:
            self.param_groups.pop()
            raise
        self._own_lr(group)
        self._forget_plans()

    def _validate(self, group: dict[str, Any]) -> None:
        """Raise ValueError unless the group can be honoured; normalise its values in place."""
        for name in ("max_grad_norm", "seed", "set_grad_none"):
            if name in group:
                raise ValueError(
                    f"{name} is one for the whole optimizer: give it to the constructor, "
                    "not to a group"
                )
        for name in self._switches:
            group[name] = _as_switch(group[name], name)
        for name in ("lr", "weight_decay"):
            if not 0 <= _as_number(group[name], name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {group[name]}")
        for name, default in (("foreach", None), ("fused", None), ("differentiable", False)):
            if group.get(name) not in (None, default, True if name == "fused" else default):
                allowed = "None or True" if name == "fused" else repr(default)
                raise ValueError(
                    f"{name}={group[name]!r} cannot be honoured: leave it at {allowed}"
                )
        group["master_weight_dtype"] = _as_code(
            group["master_weight_dtype"], "master_weight_dtype", (torch.float32, torch.float16)
        )
        bits = group["master_weight_bits"]
        if bits is not None and (type(bits) is not int or bits != 24):
            raise ValueError(
                f"master_weight_bits must be None or 24, got {group['master_weight_bits']!r}"
            )
        if group["master_weight_bits"] and group["store_param_remainders"]:
            raise ValueError(
                "store_param_remainders=True keeps a 32-bit master and master_weight_bits=24 one "
                "of 24 bits: give one of them"
            )

    def _own_lr(self, group: dict[str, Any]) -> None:
        """Give a group an lr of its own, on the device where a captured graph reads it."""
        lr = group["lr"]
        others = [other["lr"] for other in self.param_groups if other is not group]
        if isinstance(lr, Tensor) and any(lr is other for other in others):
            group["lr"] = lr.clone()
        cuda = next((p.device for p in group["params"] if p.is_cuda), None)
        if group["capturable"] and cuda is not None:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=cuda)

    @staticmethod
    def _check_param(param: Tensor, name: str, group: dict[str, Any]) -> None:
        if torch.nn.parameter.is_lazy(param):
            return  # looked at once it has a gradient
        place = _weight_of(param)
        if is_traceable_wrapper_subclass(place.data):
            raise TypeError(f"{name} is a {type(param).__name__}, expected a plain tensor")
        if place.scaling is not None and not group["master_weights"]:
            raise ValueError(
                f"{name} is fp8 and needs master_weights=True: an update is smaller than what fp8 "
                "can resolve"
            )
        if isinstance(param, _Fp8Parameter) and param.dtype not in _FP8_LARGEST:
            raise TypeError(
                f"{name} is an fp8 parameter that was cast to {param.dtype}: its numbers are "
                "codes. Leave it out of .to(dtype), or take fp8_dequantize() of it before"
            )
        if place.data.is_neg() or place.data.is_conj():
            raise TypeError(
                f"{name} is a view that negates other numbers, expected numbers of its own: "
                ".resolve_neg()"
            )
        if place.scaling is None and place.data.dtype not in _PARAM_DTYPES:
            raise TypeError(
                f"{name} has dtype {param.dtype}, expected one of {_listed(_PARAM_DTYPES)}, "
                "or fp8 as made by fp8_parameter()"
            )
        if param.layout is not torch.strided or not _is_dense(place.data):
            raise TypeError(
                f"{name} of shape {tuple(param.shape)} must be strided, dense and free of overlap "
                f"(.contiguous() or channels_last), got {param.layout} with strides "
                f"{param.stride() if param.layout is torch.strided else None}"
            )

    def _check_shapes(self, param: Tensor, name: str) -> None:
        """A state of another shape: only the user knows what to do with it."""
        for key, value in self.state.get(param, {}).items():
            if (
                _has_shape_of_param(key)
                and isinstance(value, Tensor)
                and value.shape != param.shape
            ):
                raise RuntimeError(
                    f"{name} has shape {tuple(param.shape)}, its {key} {tuple(value.shape)}: "
                    "delete optimizer.state[parameter] to begin anew"
                )

    @staticmethod
    def _check_grad(param: Tensor, grad: Tensor, name: str) -> None:
        if is_traceable_wrapper_subclass(grad):
            raise TypeError(f"{name} has a gradient of type {type(grad).__name__}, not Tensor")
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{name} has a gradient of layout {grad.layout}, expected a dense one"
            )
        if grad.dtype not in _PARAM_DTYPES:
            raise TypeError(
                f"{name} has a gradient of {grad.dtype}, expected one of {_listed(_PARAM_DTYPES)}"
            )
        if grad.device != param.device or grad.shape != param.shape:
            raise RuntimeError(
                f"{name} is of shape {tuple(param.shape)} on {param.device}, its gradient of "
                f"{tuple(grad.shape)} on {grad.device}"
            )

    # -- states

    def _form(self, param: Tensor, group: dict[str, Any]) -> _Form:
        """How this parameter's states and master are to be kept."""
        small = param.numel() < _SMALL
        dtype = _weight_of(param).data.dtype
        states = tuple(
            (name, _F32 if small else _CODES[kept], role)
            for name, kept, role in self._states(group)
        )
        master: _Code | torch.dtype | None = None
        remainder = group["store_param_remainders"] or group["master_weight_bits"]
        if dtype is torch.bfloat16 and remainder:
            master = torch.int16 if group["store_param_remainders"] else torch.int8
        elif dtype is not torch.float32 and (group["master_weights"] or remainder):
            master = _F32 if small else _CODES[group["master_weight_dtype"]]
        stochastic = bool(group["stochastic_rounding"]) and master is None
        return _Form(states, master, stochastic and dtype is torch.bfloat16)

    @torch.no_grad()
    def _init_state(
        self, param: Tensor, form: _Form, source: Mapping[str, Any] | None = None
    ) -> None:
        """Make the state of one parameter as its form says.

        Args:
            param: the parameter.
            form: how its state is to be kept.
            source: the state to make it from, kept in any form; None: what there is already. What
                fits is taken bit for bit, what does not is converted.
        """
        state, place = self.state[param], _weight_of(param)
        copy = source is not None
        source = dict(state) if source is None else source
        step = torch.as_tensor(source.get("step", 0.0), dtype=torch.float32)
        state["step"] = step.to(param.device, copy=copy)
        for stream, (name, code, role) in enumerate(form.states):
            old, scale = source.get(name), source.get(f"{name}_scale")
            if self._take(param, name, code, source, copy):
                continue
            state[name] = torch.zeros_like(place.data, dtype=code.dtype, requires_grad=False)
            state.pop(f"{name}_scale", None)
            if code.top is not None:
                state[f"{name}_scale"] = self._new_scales(param)
            if old is None:
                self._state_is_new(param)
            else:
                values = _in_order(place.data, _unscaled(old, scale, role))
                self._set_state(param, form, stream, values)
        master = form.master
        if master is None or not self._take(param, "master_param", master, source, copy):
            state.pop("master_param", None)
            state.pop("master_param_scale", None)
            if master is not None:
                self._set_master(param, form, _read_weight(place, source))
            elif copy and "master_param" in source and place.data.dtype is torch.float32:
                _flat(place.data).copy_(_read_weight(place, source))
        if place.largest and place.scaling is not None:  # with the checkpoint too
            for mine, name in zip(place.scaling, _SCALING, strict=True):
                if copy and name in source:
                    mine.copy_(torch.as_tensor(source[name]).reshape(()))
                if state.get(name) is not mine:
                    state[name] = mine

    def _take(
        self,
        param: Tensor,
        name: str,
        kept: _Code | torch.dtype,
        source: Mapping[str, Any],
        copy: bool,
    ) -> bool:
        """Take one tensor of a state as it is, if it is kept in the wanted form."""
        state, data = self.state[param], _weight_of(param).data
        old, scale = source.get(name), source.get(f"{name}_scale")
        dtype = kept.dtype if isinstance(kept, _Code) else kept
        scaled = isinstance(kept, _Code) and kept.top is not None
        if (
            old is None
            or old.dtype != dtype
            or _layout(old) != _layout(data)
            or (dtype in _REMAINDERS and data.dtype is not torch.bfloat16)
            or (scaled and scale is None)
            or (not copy and old.device != data.device)
        ):
            return False
        if copy:
            state[name] = torch.empty_like(data, dtype=dtype, requires_grad=False).copy_(old)
        if scale is not None and scaled and (copy or scale.device != data.device):
            state[f"{name}_scale"] = scale.to(data.device, torch.float32, copy=True)
        return True

    def _state_is_new(self, param: Tensor) -> None:
        """Called when a parameter gets a state that it did not have."""

    @staticmethod
    def _new_scales(param: Tensor) -> Tensor:
        return torch.ones(_blocks(param), dtype=torch.float32, device=param.device)

    def _set_state(self, param: Tensor, form: _Form, stream: int, values: Tensor) -> None:
        """Overwrite one state from flat fp32 values in the parameter's memory order."""
        state = self.state[param]
        name, code, role = form.states[stream]
        raw, scale = _encode(
            code, role, values, partial(_random, self._seed, state["step"], stream)
        )
        _flat(state[name]).copy_(raw)
        if scale is not None:
            state[f"{name}_scale"].copy_(scale)

    def _set_master(self, param: Tensor, form: _Form, weight: Tensor) -> None:
        """Make or overwrite the master of a parameter from its flat fp32 weight."""
        state, place, master = self.state[param], _weight_of(param), form.master
        assert master is not None
        if "master_param" not in state:
            dtype = master if isinstance(master, torch.dtype) else master.dtype
            state["master_param"] = torch.empty_like(place.data, dtype=dtype, requires_grad=False)
            if isinstance(master, _Code) and master.top is not None:
                state["master_param_scale"] = self._new_scales(param)
        noise = partial(_random, self._seed, state["step"], _WEIGHT_STREAM)
        for target, value in _write_weight(place, form, state, weight, noise):
            target.copy_(value)

    def _form_of(self, param: Tensor) -> _Form:
        for group in self.param_groups:
            if any(param is other for other in group["params"]):
                return self._form(param, group)
        raise KeyError(f"a parameter of shape {tuple(param.shape)} is not in this optimizer")

    def init_state(self) -> None:
        """Make the state of every parameter that requires a gradient, and the kernels, now.

        Afterwards step() allocates nothing and can be captured in a CUDA graph at once.
        """
        self._make_plans(every=True)

    # -- plans

    def _forget_plans(self) -> None:
        # A captured graph may still read the tables of the plans it was captured with.
        retired = getattr(self, "_retired", [])
        single = [made for made, _ in getattr(self, "_single_plans", {}).values()]
        plans = [*getattr(self, "_plans", []), *single]
        retired += [made for made in plans if made.plan.captured]
        self._last_backend = _backends(plans) or self._last_backend
        self._retired: list[_DevicePlan] = retired
        self._plans: list[_DevicePlan] = []
        self._single_plans: dict[Tensor, tuple[_DevicePlan, list[Any]]] = {}

    def _gradient(self, param: Tensor, group: dict[str, Any]) -> Tensor | None:
        if group["use_decoupled_grad"]:
            return getattr(param, "decoupled_grad", None)
        return param.grad

    @_hidden_from_dynamo
    def _make_plans(self, every: bool = False) -> None:
        """Check every gradient, build kernels, make states, and plan one step per device.

        Args:
            every: also make the state of parameters that have no gradient yet.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() would have to make optimizer state while a CUDA graph is captured: "
                "run one eager step or call init_state() first"
            )
        rows: dict[torch.device, list[_Row]] = {}
        present = {param for group in self.param_groups for param in group["params"]}
        self._grad_dtypes = {p: dtype for p, dtype in self._grad_dtypes.items() if p in present}
        for index, group in enumerate(self.param_groups):
            self._validate(group)
            for i, param in enumerate(group["params"]):
                name = f"parameter {i} of group {index}"
                rows.setdefault(param.device, []).append(self._row(param, index, name, every))
        finishers = [
            self._prepare(device, device_rows)
            for device, device_rows in rows.items()
            if any(row.grad_dtype is not None for row in device_rows)
        ]
        self._forget_plans()
        self._plans = [finish() for finish in finishers]
        self._planned_state = self._version_of_state()
        _ = self.last_step_skipped  # made now: a step allocates nothing
        if self.max_grad_norm is not None:
            self._prepare_norm()
        self._fp8_parts = {
            param: _parts(param)
            for group in self.param_groups
            for param in group["params"]
            if not torch.nn.parameter.is_lazy(param) and _weight_of(param).scaling is not None
        }

    def _prepare_norm(self) -> None:
        for made in self._plans:
            if not made.plan.has_norm:
                made.plan.prepare_norm(_load_gradient_kernels(made.backend))
        if self._plans:
            device = self._plans[0].device
            if self.max_grad_norm is not None and (
                self.grad_norm is None or self.grad_norm.device != device
            ):
                self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)

    def _row(self, param: Tensor, index: int, name: str, every: bool) -> _Row:
        """One parameter of a plan, checked."""
        group = self.param_groups[index]
        grad = self._gradient(param, group)
        if grad is not None:
            self._check_param(param, name, group)
            self._check_grad(param, grad, name)
            self._check_shapes(param, name)
            self._grad_dtypes[param] = grad.dtype
        used = grad is not None or param in self.state or (every and param.requires_grad)
        if used and grad is None:
            used = self._can_have_state(param, name, group, every)
        kept = torch.float32 if not used else _weight_of(param).data.dtype
        likely = kept if kept in _PARAM_DTYPES else torch.bfloat16
        if used and not group["use_decoupled_grad"] and param.grad_dtype in _PARAM_DTYPES:
            likely = param.grad_dtype
        return _Row(param, index, self._grad_dtypes.get(param, likely) if used else None)

    def _can_have_state(self, param: Tensor, name: str, group: dict[str, Any], every: bool) -> bool:
        """Whether a parameter without a gradient is fit for a step; it must not stop the others.

        Args:
            param: the parameter.
            name: what errors call it.
            group: its group.
            every: raise if it is unfit: its state was asked for.
        """
        if torch.nn.parameter.is_lazy(param):
            return False
        try:
            self._check_param(param, name, group)
            self._check_shapes(param, name)
        except (TypeError, ValueError, RuntimeError):
            if every:
                raise
            return False
        return True

    def _step_one(self, param: Tensor) -> None:
        """Step one parameter, which has a gradient, by a plan of its own."""
        made, planned = self._single_plans.get(param, (None, []))
        if (
            made is None
            or not _are_same(planned, self._tensors_of(param))
            or not made.plan.step(self.param_groups, None, None)
        ):
            if made is not None and made.plan.captured:
                self._retired.append(made)
            made = self._plan_of_one(param)
            self._single_plans[param] = made, self._tensors_of(param)
            if not made.plan.step(self.param_groups, None, None):
                raise RuntimeError(
                    "a gradient has no memory of its own, or changed while the step was prepared"
                )

    def _tensors_of(self, param: Tensor) -> list[Any]:
        """What a plan of one parameter points to, beside the parameter."""
        return [*self.state.get(param, {}).values(), *_parts(param)]

    def _plan_of_one(self, param: Tensor) -> _DevicePlan:
        for index, group in enumerate(self.param_groups):
            for i, other in enumerate(group["params"]):
                if other is param:
                    row = self._row(param, index, f"parameter {i} of group {index}", False)
                    finish = self._prepare(param.device, [row])
                    self._is_preparing = True  # the plans of other parameters stay
                    try:
                        return finish()
                    finally:
                        self._is_preparing = False
        raise AssertionError("a hook of a parameter that is not in the optimizer")

    def _prepare(self, device: torch.device, rows: list[_Row]) -> Callable[[], _DevicePlan]:
        """Build what a plan of one device needs; what is returned makes states and the plan."""
        backend = _backend_for(device.type)
        groups = self.param_groups
        decoupled = any(groups[row.group]["use_decoupled_grad"] for row in rows)
        sources = [(row.param, groups[row.group]) for row in rows] if decoupled else None
        forms = {row.param: self._form(row.param, groups[row.group]) for row in rows}
        if backend == "torch":

            def finish_torch() -> _DevicePlan:
                for row in rows:
                    if row.grad_dtype is not None:
                        self._init_state(row.param, forms[row.param])
                return _DevicePlan(backend, device, _TorchPlan(self, device, rows, forms), sources)

            return finish_torch

        signatures = {
            row.param: self._signature(row.param, row.grad_dtype, forms[row.param])
            for row in rows
            if row.grad_dtype is not None
        }
        distinct = list(dict.fromkeys(signatures.values()))
        bindings, addresses = _load_kernels(backend, distinct)

        def finish() -> _DevicePlan:
            plan = bindings.Plan(
                device=device,
                hyperparameters=tuple(sys.intern(key) for key in self._hyperparameters),
                structure=tuple(sys.intern(key) for key in self._structure),
                groups=self.param_groups,
                kernels=addresses,
                seed=self._seed,
            )
            for row in rows:
                if row.grad_dtype is None:
                    plan.watch(row.param)
                    continue
                form, place = forms[row.param], _weight_of(row.param)
                self._init_state(row.param, form)
                state = self.state[row.param]
                plan.add(
                    param=row.param,
                    data=place.data,
                    grad_dtype=row.grad_dtype,
                    step=state["step"],
                    states=[state[name] for name, _, _ in form.states],
                    scales=[state.get(f"{name}_scale") for name, _, _ in form.states],
                    master=state.get("master_param"),
                    master_scale=state.get("master_param_scale"),
                    scaling=list(place.scaling or ()),
                    fp8_largest=place.largest,
                    group=row.group,
                    signature=distinct.index(signatures[row.param]),
                )
            plan.seal()
            return _DevicePlan(backend, device, plan, sources)

        return finish

    def _signature(self, param: Tensor, grad_dtype: torch.dtype, form: _Form) -> _Signature:
        master = form.master
        return _Signature(
            self._rule,
            _CODES[_weight_of(param).data.dtype].name,
            _CODES[grad_dtype].name,
            "None"
            if master is None
            else _REMAINDERS[master]
            if isinstance(master, torch.dtype)
            else master.name,
            form.stochastic,
            tuple(code.name for _, code, _ in form.states),
        )

    # -- step

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Do one optimization step; parameters without a gradient are left alone.

        Args:
            closure: reevaluates the model and returns the loss.
            **options: `grad_scaler`, a torch.amp.GradScaler, as TransformerEngine takes it;
                `scaler.step(optimizer)` does the same.

        Returns:
            The closure's loss, or None.

        Raises:
            TypeError, RuntimeError: a gradient cannot be used; nothing was changed.
            BuildError: the kernels could not be compiled; nothing was changed.
        """
        if _is_observed(self):
            return self._observed_step(closure, **options)
        if (
            closure is None
            and not options
            and self._is_simple()
            and self._plan_still_fits()
            and self._plans[0].plan.step(self.param_groups, self._max_grad_norm, self.grad_norm)
        ):
            return None  # the usual case, in one native call
        return self._step(closure, **options)

    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = self._scaling(**options)
        if self._in_backward is not None:
            return self._in_backward.end_of_iteration(loss, scaling)
        grad_scale, found_inf = scaling.grad_scale, scaling.found_inf
        if scaling.is_checked:
            self._note_skip(found_inf)
        if self._plans and not self._plan_still_fits():
            self._forget_plans()
        if not self._gather():
            self._make_plans()
            if not self._gather():
                raise RuntimeError(
                    "gradients have no memory of their own, or changed while the step was prepared"
                )
        norm_sq = None
        if self.max_grad_norm is not None or not scaling.is_checked:
            norm_sq = self._norm_sq(None if scaling.is_checked else found_inf)
            if not scaling.is_checked:
                self._note_skip(found_inf)
            if self.max_grad_norm is None:
                norm_sq = None
        grad_norm = None if norm_sq is None else self.grad_norm
        gathered = [made for made in self._plans if made.plan.gathered]
        if grad_norm is not None and not gathered:
            grad_norm.zero_()
        for made in gathered:
            local_norm = _on(made.device, grad_norm) if made is gathered[0] else None
            made.plan.launch(
                groups=self.param_groups,
                grad_scale=_on(made.device, grad_scale),
                found_inf=_on(made.device, found_inf),
                norm_sq=_on(made.device, norm_sq),
                max_grad_norm=self.max_grad_norm or 0.0,
                grad_norm=local_norm,
            )
            if grad_norm is not None and local_norm is not None and local_norm is not grad_norm:
                grad_norm.copy_(local_norm)
        if scaling.record is not None:
            scaling.record["stage"] = OptState.STEPPED
        return loss

    def _is_simple(self) -> bool:
        """Whether there is one plan, which has all that a step needs to know."""
        return (
            len(self._plans) == 1
            and self._plans[0].sources is None
            and self._in_backward is None
            and "found_inf" not in self.__dict__
            and "grad_scale" not in self.__dict__
        )

    def _plan_still_fits(self) -> bool:
        """Whether nobody replaced a tensor of a state, or the storage of an fp8 parameter."""
        return self._version_of_state() == self._planned_state and not (
            self._fp8_parts
            and not all(_are_same(_parts(param), parts) for param, parts in self._fp8_parts.items())
        )

    def _version_of_state(self) -> tuple[int, int]:
        if type(self.state) is not _State:  # the user set another dict
            self.state = _State(self.state, self)
        return id(self.state), self.state.changes.count

    def _note_skip(self, found_inf: Tensor | None) -> None:
        if found_inf is not None:
            if self._skipped is None or self._skipped.device != found_inf.device:
                self._skipped = torch.zeros((), dtype=torch.bool, device=found_inf.device)
            torch.ne(found_inf, 0, out=self._skipped)

    def _norm_sq(self, found_inf: Tensor | None) -> Tensor | None:
        """The sum of squares of all gradients, on the first plan's device.

        Args:
            found_inf: one fp32 number, set to 1 if a gradient is infinite or NaN and to 0 if not.
        """
        self._prepare_norm()  # max_grad_norm may be set at any time
        sums: list[Tensor] = []
        flags: list[Tensor | None] = [None] * len(self._plans)
        if len(self._plans) == 1 and _on(self._plans[0].device, found_inf) is found_inf:
            flags = [found_inf]
        elif found_inf is not None:
            found_inf.zero_()
            flags = [
                torch.zeros((), dtype=torch.float32, device=made.device) for made in self._plans
            ]
        for made, flag in zip(self._plans, flags, strict=True):
            sums.append(made.plan.norm_sq(self.param_groups, flag))
            if found_inf is not None and flag is not None and flag is not found_inf:
                found_inf += flag.to(found_inf.device)
        return _total(sums) if sums else None

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _gather(self) -> bool:
        if not self._plans:
            every = [(p, group) for group in self.param_groups for p in group["params"]]
            if any(self._gradient(*each) is not None for each in every):
                return False
            if any(param.grad is not None for param, _ in every):
                _warn_once(
                    "use_decoupled_grad=True reads p.decoupled_grad, which no parameter has: "
                    "p.grad is not used"
                )
            return True
        return all(
            made.plan.fits(self.param_groups)
            and made.plan.gather(
                None if made.sources is None else [self._gradient(*row) for row in made.sources]
            )
            for made in self._plans
        )

    def _scaling(self, grad_scaler: Any = None) -> _Scaling:
        if grad_scaler is not None and not hasattr(grad_scaler, "is_enabled"):
            raise TypeError(f"grad_scaler must be a GradScaler, got {type(grad_scaler).__name__}")
        if grad_scaler is not None and grad_scaler.is_enabled():
            return self._scaling_of(grad_scaler)
        grad_scale = self.__dict__.get("grad_scale")  # GradScaler.step sets both for a while
        found_inf = self.__dict__.get("found_inf")
        if found_inf is not None and self._is_decoupled():
            raise RuntimeError(
                "scaler.step(optimizer) looks for infinities in p.grad only: with "
                "use_decoupled_grad=True call optimizer.step(grad_scaler=scaler)"
            )
        if isinstance(found_inf, Tensor):
            return _Scaling(grad_scale, found_inf.reshape(()))
        return _Scaling(grad_scale, None)

    def _scaling_of(self, grad_scaler: Any) -> _Scaling:
        """What GradScaler.step would have set, for a scaler that was handed to step()."""
        if grad_scaler._scale is None:
            raise RuntimeError("grad_scaler has scaled no loss yet: call grad_scaler.scale(loss)")
        record = grad_scaler._per_optimizer_states[id(self)]
        scale = grad_scaler._get_scale_async()
        if record["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has been called already since the scaler's last update()")
        if record["stage"] is OptState.UNSCALED and self._is_decoupled():
            raise RuntimeError(
                "scaler.unscale_() divides p.grad only: with use_decoupled_grad=True leave it to "
                "optimizer.step(grad_scaler=scaler)"
            )
        if record["stage"] is OptState.READY and (
            self.max_grad_norm is not None or self._is_decoupled()
        ):
            if self._found_inf is None or self._found_inf.device != scale.device:
                self._found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
            record["found_inf_per_device"] = {scale.device: self._found_inf}
            return _Scaling(scale, self._found_inf, False, record)
        if record["stage"] is OptState.READY:
            grad_scaler._check_inf_per_device(self)
        flags = [flag.to(scale.device) for flag in record["found_inf_per_device"].values()]
        found_inf = torch.stack(flags).sum(dim=0).reshape(()) if flags else None
        is_scaled = record["stage"] is OptState.READY
        return _Scaling(scale if is_scaled else None, found_inf, record=record)

    def _is_decoupled(self) -> bool:
        return any(group["use_decoupled_grad"] for group in self.param_groups)

    # -- checkpoints

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """One state, or "master_param", of a parameter in fp32 and in its shape, as a copy."""
        form, state = self._form_of(param), self.state.get(param, {})
        if state_name not in state:
            raise KeyError(f"no state {state_name!r}: there are {', '.join(state) or 'none yet'}")
        if state_name == "master_param":
            place = _weight_of(param)
            target = torch.empty_like(place.data, dtype=torch.float32, requires_grad=False)
            _flat(target).copy_(_read_weight(place, state))
            return target
        roles = {name: role for name, _, role in form.states}
        role = roles.get(state_name, _Role.MOMENT)
        return _unscaled(state[state_name], state.get(f"{state_name}_scale"), role)

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store one state, or "master_param", of a parameter from fp32 values of its shape.

        Args:
            param: a parameter of this optimizer; what state it lacks is made.
            state_name: for example "exp_avg"; "master_param" also sets the parameter.
            unscaled_state: values of the parameter's shape, any float dtype.

        Raises:
            KeyError: there is no such state.
            ValueError: these are not real numbers of the parameter's shape.
        """
        form = self._form_of(param)
        names = [name for name, _, _ in form.states] + ["master_param"] * (form.master is not None)
        if state_name not in names:
            raise KeyError(f"no state {state_name!r}: there are {', '.join(names) or 'none'}")
        if not isinstance(unscaled_state, Tensor) or unscaled_state.is_complex():
            kind = getattr(unscaled_state, "dtype", type(unscaled_state).__name__)
            raise ValueError(f"{state_name} must be a tensor of real numbers, got {kind}")
        if unscaled_state.shape != param.shape:
            raise ValueError(
                f"{state_name} has shape {tuple(unscaled_state.shape)}, its parameter "
                f"{tuple(param.shape)}"
            )
        self._init_state(param, form)
        values = _in_order(_weight_of(param).data, unscaled_state)
        if state_name == "master_param":
            self._set_master(param, form, values)
        else:
            self._set_state(param, form, names.index(state_name), values)

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Make the state of one parameter, as its group's options say.

        Args:
            param: a parameter of this optimizer.
            store_param_remainders: accepted if it is None or what the group says.

        Raises:
            ValueError: it contradicts the group.
        """
        for group in self.param_groups:
            wanted = group["store_param_remainders"]
            if store_param_remainders not in (None, wanted) and any(
                param is other for other in group["params"]
            ):
                raise ValueError(
                    f"store_param_remainders={store_param_remainders}, but the parameter's group "
                    f"has {wanted}"
                )
        self._init_state(param, self._form_of(param))
        self._forget_plans()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer.state_dict: loads with torch.load(weights_only=True)."""
        state_dict = super().state_dict()
        state_dict["state"] = {
            key: dict(value) if isinstance(value, _ParamState) else value
            for key, value in state_dict["state"].items()
        }
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer in any of its modes, or of its torch.optim twin.

        How states and masters are kept is what this optimizer was constructed with: what was saved
        otherwise is converted, one tensor at a time. Hyperparameters are the file's; a key that a
        saved group lacks keeps the constructor's value. Load the model first: a file with
        remainders holds only what its bf16 parameters lack. fp32 parameters, which have no master,
        become what the file's master was.

        Args:
            state_dict: what state_dict() returned, here or in torch.optim.

        Raises:
            ValueError: groups, numbers of parameters or shapes differ; nothing was changed.
        """
        if not isinstance(state_dict, dict):
            raise ValueError(f"state_dict must be a dict, got {type(state_dict).__name__}")
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        if missing := {"state", "param_groups"} - state_dict.keys():
            raise ValueError(f"this is no optimizer's state_dict: it has no {min(missing)}")
        _check_kinds_of_checkpoint(state_dict)
        saved_groups = [dict(group) for group in state_dict["param_groups"]]
        params = self._matching_params(saved_groups, state_dict["state"])
        groups = [
            self._loaded_group(*both) for both in zip(self.param_groups, saved_groups, strict=True)
        ]

        old_state, old_groups = self.state, self.param_groups
        self.state, self.param_groups = _State(), groups
        try:
            for group in groups:
                self._validate(group)
            for group, saved_group in zip(groups, saved_groups, strict=True):
                for param, key in zip(group["params"], saved_group["params"], strict=True):
                    if key in state_dict["state"]:
                        saved = self._saved_state(state_dict["state"][key])
                        self._init_state(param, self._form(param, group), saved)
            for key, value in state_dict["state"].items():
                if key not in params:
                    self.state[key] = deepcopy(value)
        except Exception:
            self.state, self.param_groups = old_state, old_groups
            raise
        for group in groups:
            self._own_lr(group)
        self.__setstate__({"state": self.state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _matching_params(
        self, saved_groups: list[dict[str, Any]], saved_state: dict[Any, Any]
    ) -> dict[Any, Tensor]:
        """Saved key -> parameter; ValueError at the first mismatch."""
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        params: dict[Any, Tensor] = {}
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            if len(saved["params"]) != len(group["params"]):
                raise ValueError(
                    f"group {i} of the checkpoint has {len(saved['params'])} parameters, of the "
                    f"optimizer {len(group['params'])}"
                )
            if foreign := sorted(saved.keys() & _OF_SOME - group.keys()):
                raise ValueError(
                    f"the checkpoint is of another optimizer: group {i} has {foreign[0]}, which "
                    f"{type(self).__name__} does not know"
                )
            params.update(zip(saved["params"], group["params"], strict=True))
        known = (*self._state_names, "master_param")
        for key, param in params.items():
            for name, value in saved_state.get(key, {}).items():
                if value is None:
                    continue
                if name == "step" or name in _SCALING:
                    if not 0 <= _as_number(value, f"{name} of parameter {key}") < math.inf:
                        raise ValueError(f"{name} of parameter {key} is {value} in the checkpoint")
                    continue
                if name.removesuffix("_scale") not in known:
                    raise ValueError(
                        f"the checkpoint is of another optimizer: parameter {key} has {name}, "
                        f"{type(self).__name__} keeps {', '.join(self._state_names)}"
                    )
                if not isinstance(value, Tensor):
                    raise ValueError(
                        f"{name} of parameter {key} is of type {type(value).__name__} in the "
                        "checkpoint, expected a tensor"
                    )
                if value.layout is not torch.strided or value.is_meta or value.is_complex():
                    raise ValueError(
                        f"{name} of parameter {key} is {value.layout}, {value.dtype} on "
                        f"{value.device} in the checkpoint, expected dense real numbers"
                    )
                wanted = param.shape if _has_shape_of_param(name) else (_blocks(param),)
                if value.shape != wanted:
                    raise ValueError(
                        f"{name} of parameter {key} has shape {tuple(value.shape)} in the "
                        f"checkpoint, the parameter {tuple(param.shape)} asks for {tuple(wanted)}"
                    )
                if value.dtype in _FP8_LARGEST and saved_state[key].get(f"{name}_scale") is None:
                    raise ValueError(
                        f"{name} of parameter {key} is {value.dtype} in the checkpoint, but it has "
                        f"no {name}_scale"
                    )
                if name.endswith("_scale") and not ((value > 0) & value.isfinite()).all():
                    raise ValueError(
                        f"{name} of parameter {key} has {float(value.min())} in the checkpoint, "
                        "scales are positive and finite"
                    )
            if key in saved_state:
                self._check_complete(key, self._saved_state(saved_state[key]))
        return params

    def _check_complete(self, key: Any, saved: Mapping[str, Any]) -> None:
        """ValueError if a saved state lacks what one of this class never lacks."""
        for name in self._always_has if float(saved.get("step", 0)) > 0 else ():
            if name not in saved:
                raise ValueError(
                    f"the checkpoint is of another optimizer: parameter {key} has no {name}, "
                    f"{type(self).__name__} keeps {', '.join(self._state_names)}"
                )

    def _loaded_group(self, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """A group with the hyperparameters of the file and the modes of this optimizer."""
        loaded = {**group, **deepcopy({k: v for k, v in saved.items() if k != "params"})}
        for key in (*self._modes, "capturable", "foreach", "fused", "differentiable"):
            if key in group:
                loaded[key] = group[key]
        loaded["params"] = group["params"]
        if "param_names" in group:
            loaded.setdefault("param_names", group["param_names"])
        return loaded

    def _saved_state(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """One parameter's state in a file, as this class would have saved it."""
        return {name: value for name, value in saved.items() if value is not None}

    def to_torch_state_dict(self) -> dict[str, Any]:
        """A checkpoint that the torch.optim twin of this optimizer loads: states in fp32.

        Raises:
            ValueError: a group uses an option that the twin does not have.
        """
        state_dict = self.state_dict()
        state_dict["state"], packed_groups = {}, state_dict["param_groups"]
        state_dict["param_groups"] = []
        for group, packed in zip(self.param_groups, packed_groups, strict=True):
            state_dict["param_groups"].append(
                {
                    **{k: v for k, v in packed.items() if k not in self.defaults},
                    **self._torch_group(group),
                }
            )
            for param, key in zip(group["params"], packed["params"], strict=True):
                if param in self.state:
                    form = self._form(param, group)
                    state_dict["state"][key] = self._torch_state(param, form)
        return state_dict

    def _torch_state(self, param: Tensor, form: _Form) -> dict[str, Any]:
        state = self.state[param]
        states = {  # zeros of an option that was switched on since the last step
            name: _unscaled(state[name], state.get(f"{name}_scale"), role)
            if name in state
            else torch.zeros_like(_weight_of(param).data, dtype=torch.float32, requires_grad=False)
            for name, _, role in form.states
        }
        return {"step": state["step"].clone(), **states}

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """The keys of a group that the torch.optim twin knows."""
        raise NotImplementedError

    # -- pickle, zero_grad

    def __getstate__(self) -> dict[str, Any]:
        packed = {
            key: {name: _pack(value) for name, value in values.items()}
            for key, values in self.state.items()
            if isinstance(values, dict)
        }
        names = ("_seed", "_grad_none", "_max_grad_norm", "grad_norm")
        own = {"state": packed, **{name: getattr(self, name) for name in names}}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unpacked = {
            key: {name: _unpack(value) for name, value in values.items()}
            if isinstance(values, dict)
            else values
            for key, values in state["state"].items()
        }
        state = {**state, "state": _State(unpacked, self)}
        if "max_grad_norm" in state:  # a pickle of before that was checked when set
            state["_max_grad_norm"] = state.pop("max_grad_norm")
        super().__setstate__(state)
        for name in ("_in_backward", "_skipped", "_found_inf"):
            self.__dict__.setdefault(name, None)
        self._grad_dtypes = {}
        self._forget_plans()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset every gradient, `decoupled_grad` too where a group uses it.

        Args:
            set_to_none: drop the gradients instead of filling them with zeros. None: as
                `set_grad_none` of the constructor says, which by default is to drop them.
        """
        set_to_none = self._grad_none if set_to_none is None else set_to_none
        _plain(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        for group in self.param_groups:
            if not group["use_decoupled_grad"]:
                continue
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                if grad is not None and set_to_none:
                    param.decoupled_grad = None
                elif grad is not None:
                    grad.zero_()


# ---- Stepping inside backward() ------------------------------------------------------------------


class _StepInBackward:
    """What step_in_backward() returns; `remove()` ends it."""

    def __init__(self, optimizer: _FusedOptimizer) -> None:
        self.optimizer = optimizer
        self.done: set[Tensor] = set()
        self.counts = False  # step() is called, so a second backward() before it can be told
        self.hooks = [
            param.register_post_accumulate_grad_hook(self._step)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        ]

    def remove(self) -> None:
        """Step in step() again."""
        for hook in self.hooks:
            hook.remove()
        self.optimizer._in_backward = None
        self.optimizer._forget_plans()  # those of one parameter each

    def end_of_iteration(self, loss: Any, scaling: _Scaling) -> Any:
        """What step() does meanwhile: little is left to update."""
        if scaling.grad_scale is not None or scaling.found_inf is not None:
            raise RuntimeError(
                "step_in_backward() cannot be combined with a GradScaler: gradients are used "
                "before all of them are known to be finite"
            )
        self.counts = True
        self.done.clear()
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:  # it was frozen or in no group when hooks were made
                    self.optimizer._step_one(param)
                    param.grad = None
        return loss

    @torch.no_grad()
    def _step(self, param: Tensor) -> None:
        if self.counts and param in self.done:
            raise RuntimeError(
                "step_in_backward() cannot accumulate gradients: a second backward() came before "
                "step()"
            )
        self.done.add(param)
        self.optimizer._step_one(param)
        param.grad = None


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that their norm, as of one vector, is at most ``max_norm``.

    `torch.nn.utils.clip_grad_norm_` in two launches per device, for any mix of dtypes and without
    waiting for the device. An optimizer of this module with ``max_grad_norm`` clips in its step
    instead and writes no gradient.

    Args:
        parameters: a tensor or several, whose ``grad`` is clipped in place.
        max_norm: not negative.
        norm_type: a number, math.inf or "inf"; other norms than 2 are left to torch.
        error_if_nonfinite: wait for the norm, and raise RuntimeError if it is infinite or NaN.
        foreach: accepted for torch's sake.

    Returns:
        The norm before clipping, 0-dim, fp32, on the device of the first gradient. Gradients that
        are DTensors count with all their shards.

    Raises:
        TypeError: one of parameters is no tensor.
        ValueError: max_norm is negative or NaN, or norm_type is no number.
        RuntimeError: the norm is infinite or NaN, and that was to be an error; no gradient changed.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not _as_number(max_norm, "max_norm") >= 0:
        raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
    norm_type = math.inf if norm_type == "inf" else _as_number(norm_type, "norm_type")
    if math.isnan(norm_type):
        raise ValueError(f"norm_type must be a number, got {norm_type}")
    try:
        norm = _clip(parameters, float(max_norm), error_if_nonfinite) if norm_type == 2 else None
        if norm is None:
            norm = _torchs_clip(parameters, float(max_norm), norm_type, error_if_nonfinite, foreach)
        return norm
    except (AttributeError, TypeError):  # looked for now only: it would take longer than the rest
        for param in parameters:
            if not isinstance(param, Tensor):
                raise TypeError(f"parameters must be tensors, got {type(param).__name__}") from None
        raise


def _clip(parameters: list[Tensor], max_norm: float, error_if_nonfinite: bool) -> Tensor | None:
    """By the kernels; None, with nothing changed: they are not for these gradients."""
    first = next((param.grad for param in parameters if param.grad is not None), None)
    if first is None:
        return torch.zeros((), dtype=torch.float32)
    parts = _parts_of_norm(parameters, first.device)
    if parts is None:
        return None
    sums = [_over_shards(part.grads.norm_sq(), part.shards) for part in parts]
    total = _total(sums)
    _reject_nonfinite(total, error_if_nonfinite)
    norms = [part.grads.clip(_on(part.device, total), max_norm) for part in parts]
    norm = norms[0]
    assert isinstance(norm, Tensor)
    return norm


class _Part(NamedTuple):
    """Gradients that are summed up together: those of one device, sharded alike."""

    device: torch.device
    shards: tuple[Any, Any] | None  # a DTensor's mesh and placements
    grads: Any  # a GradientList of the bindings


def _parts_of_norm(parameters: list[Tensor], device: torch.device) -> list[_Part] | None:
    """All gradients of ``parameters``, the first one's on ``device``; None: leave them to torch."""
    lists = _gradient_lists_of(device)
    whole = None if lists is None else lists.of(parameters)
    if whole is not None:
        return [_Part(device, None, whole)]
    locals_of: dict[tuple[torch.device, tuple[Any, Any] | None], list[Tensor]] = {}
    for grad in (param.grad for param in parameters):
        if grad is not None:
            shards = _shards_of(grad)
            local = grad if shards is None else grad.to_local()  # type: ignore[attr-defined]
            locals_of.setdefault((local.device, shards), []).append(local)
    parts = []
    for (device, shards), grads in locals_of.items():
        lists = _gradient_lists_of(device)
        made = None if lists is None else lists.make(grads)
        if made is None:
            return None
        parts.append(_Part(device, shards, made))
    return parts


def _torchs_clip(
    parameters: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """What is not for the kernels; in torch itself a norm of fp16 gradients is fp16."""
    grads = [param.grad for param in parameters if param.grad is not None]
    if norm_type != 2 or not all(
        grad.dtype in _PARAM_DTYPES
        and grad.layout is torch.strided
        and not is_traceable_wrapper_subclass(grad)
        for grad in grads
    ):
        norm = torch.nn.utils.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
        return norm if _shards_of(norm) is None else norm.full_tensor()  # type: ignore[attr-defined]
    total = _total([_sum_of_squares([grad], grad.device) for grad in grads])
    _reject_nonfinite(total, error_if_nonfinite)
    norm = total.sqrt().float().reshape(())
    factor = _clip_factor(norm, max_norm)
    for grad in grads:
        # In two steps: torch's copy of fp32 into a negating view of fp16 forgets the sign.
        grad.copy_((grad.float() * factor.to(grad.device)).to(grad.dtype))
    return norm


def _reject_nonfinite(norm_sq: Tensor, is_error: bool) -> None:
    if is_error and not norm_sq.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {float(norm_sq.sqrt())}; none was changed"
        )


_gradient_lists: dict[torch.device, Any] = {}  # what was sent to a device stays there


def _gradient_lists_of(device: torch.device) -> Any:
    """What makes GradientLists on a device, or None where there is no compiled path."""
    known = _gradient_lists.get(device)
    if known is not None and os.environ.get("FUSEDOPT_BACKEND", "") in ("", device.type):
        return known
    backend = _backend_for(device.type)
    if backend == "torch":
        return None
    bindings, _ = _load_kernels(backend, ())
    kernels = _load_gradient_kernels(backend)
    return _gradient_lists.setdefault(device, bindings.GradientLists(device, kernels))


def _shards_of(tensor: Tensor) -> tuple[Any, Any] | None:
    """The mesh and placements of a DTensor."""
    if type(tensor) is Tensor or not hasattr(tensor, "placements"):
        return None
    dtensor: Any = tensor
    return dtensor.device_mesh, dtensor.placements


def _over_shards(norm_sq: Tensor, shards: tuple[Any, Any] | None) -> Tensor:
    """A sum over local gradients, added up over the ranks that hold other shards."""
    if shards is not None:
        mesh, placements = shards
        for dim, placement in enumerate(placements):
            if placement.is_partial():
                raise RuntimeError("the norm of a gradient that is a partial sum is not defined")
            if not placement.is_replicate():  # some kind of shard
                torch.distributed.all_reduce(norm_sq, group=mesh.get_group(dim))
    return norm_sq


def _reject_in_backward(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} needs every gradient before the first step: it cannot "
            "be combined with step_in_backward()"
        )


def step_in_backward(model: torch.nn.Module, optimizer: _FusedOptimizer) -> _StepInBackward:
    """Step each parameter as soon as its gradient is complete, and free the gradient.

    At most a few gradients then exist at a time. The result is that of a step() after backward().
    step() does nothing but end the iteration; calling it lets a second backward() before it be told
    from the next iteration.

    Args:
        model: whose parameters the optimizer updates.
        optimizer: one of this module.

    Returns:
        A handle; its `remove()` ends this.

    Raises:
        ValueError: a parameter of the model is not in the optimizer, or the optimizer has
            max_grad_norm or use_decoupled_grad, which need all gradients first.
    """
    if not isinstance(optimizer, _FusedOptimizer):
        raise TypeError(
            f"optimizer must be a FusedAdam, FusedSGD or FusedLion, got {type(optimizer).__name__}"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    known = {param for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param.requires_grad and param not in known:
            raise ValueError(f"{name} is not in the optimizer: its gradient would not be freed")
    _reject_in_backward(optimizer.max_grad_norm)
    if any(group["use_decoupled_grad"] for group in optimizer.param_groups):
        raise ValueError("use_decoupled_grad=True cannot be combined with step_in_backward()")
    if optimizer._in_backward is not None:
        raise ValueError("step_in_backward() is on for this optimizer already")
    optimizer._in_backward = _StepInBackward(optimizer)
    return optimizer._in_backward


# ---- The optimizers ------------------------------------------------------------------------------


class FusedAdam(_FusedOptimizer):
    """Adam and AdamW (Kingma & Ba, 2015; Loshchilov & Hutter, 2019), fused: all tensors at once.

    A drop-in for torch.optim.AdamW and TransformerEngine's FusedAdam. Differences from torch:
    `weight_decay` is 0 by default, as in TransformerEngine (AdamW: 0.01); parameters of float64 or
    complex dtypes are a TypeError; the weight decay of decoupled mode is applied as
    `p - lr * weight_decay * p` with one rounding.

    Args:
        params: parameters (fp32, bf16, fp16, or fp8 as fp8_parameter() makes them, in any mix) or
            groups of them.
        lr: learning rate, a float or a tensor of one element.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, at least 0.
        weight_decay: decoupled (AdamW) or, with adam_w_mode=False, an L2 penalty.
        amsgrad: use the running maximum of the second moment (Reddi et al., 2018).
        bias_correction: divide the moments by 1 - beta**step.
        adam_w_mode: decoupled weight decay.
        maximize: ascend instead of descend.
        capturable: keep lr on the device, so that a captured CUDA graph follows its changes.
        master_weights: keep an fp32 copy of parameters narrower than fp32, in `state`; fp32
            parameters need none and get none, here and in the next three.
        master_weight_dtype: of that copy: torch.float32 or torch.float16 (block-scaled).
        master_weight_bits: 24 keeps 8 more bits beside a bf16 parameter instead of a copy.
        store_param_remainders: keep 16 more bits beside a bf16 parameter: the exact fp32 master.
        exp_avg_dtype: dtype of the first moment: None or "fp32", "bf16", "fp16", "fp8",
            "fp8_e5m2", or the torch.dtype; torch.uint8 means fp8. Tensors under 4096 elements
            keep fp32 states.
        exp_avg_sq_dtype: dtype of the second moment and its maximum, likewise.
        use_decoupled_grad: read `p.decoupled_grad` instead of `p.grad`.
        stochastic_rounding: round bf16 parameters without a master stochastically.
        max_grad_norm: clip the norm of all gradients, after unscaling, to this, as
            torch.nn.utils.clip_grad_norm_ does, without writing to them; `grad_norm` has it then.
        seed: of the stochastic rounding; the same on every replica.
        set_grad_none: deprecated; the default of zero_grad's set_to_none.
        foreach: accepted as None only; there is one implementation.
        fused: accepted as None or True only.
        differentiable: accepted as False only.

    Raises:
        TypeError: a parameter's dtype or layout is unsupported.
        ValueError: a value is out of its range, or two options contradict each other.
    """

    _rule = "Adam"
    _state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _always_has = ("exp_avg", "exp_avg_sq")
    _hyperparameters = (
        "maximize",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "adam_w_mode",
    )
    _modes = (*_FusedOptimizer._modes, "exp_avg_dtype", "exp_avg_sq_dtype")
    _structure = (*_modes, "amsgrad")
    _switches = (*_FusedOptimizer._switches, "amsgrad", "bias_correction", "adam_w_mode")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        maximize: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype | str = torch.float32,
        master_weight_bits: int | None = None,
        store_param_remainders: bool = False,
        exp_avg_dtype: torch.dtype | str | None = None,
        exp_avg_sq_dtype: torch.dtype | str | None = None,
        use_decoupled_grad: bool = False,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        seed: int = 0,
        set_grad_none: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        super().__init__(locals())

    def _validate(self, group: dict[str, Any]) -> None:
        _validate_betas(group)
        if not 0 <= _as_number(group["eps"], "eps") < math.inf:
            raise ValueError(f"eps must be finite and at least 0, got {group['eps']}")
        for option in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            group[option] = _as_code(group[option], option)
        super()._validate(group)

    def _states(self, group: dict[str, Any]) -> tuple[tuple[str, torch.dtype, _Role], ...]:
        second = group["exp_avg_sq_dtype"]
        states = (
            ("exp_avg", group["exp_avg_dtype"], _Role.MOMENT),
            ("exp_avg_sq", second, _Role.SECOND_MOMENT),
        )
        return (*states, ("max_exp_avg_sq", second, _Role.MAXIMUM)) if group["amsgrad"] else states

    def _update(
        self,
        weight: Tensor,
        grad: Tensor,
        states: list[Tensor],
        group: dict[str, Any],
        step: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        exp_avg, exp_avg_sq, *maximum = states
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        if decay != 0 and group["adam_w_mode"]:
            weight = weight - weight * (lr * decay)
        elif decay != 0:
            grad = grad + weight * decay
        exp_avg = exp_avg.lerp(grad, 1 - beta1)
        exp_avg_sq = exp_avg_sq * beta2 + grad * (1 - beta2) * grad
        maximum = [old.maximum(exp_avg_sq) for old in maximum]
        second = maximum[0] if maximum else exp_avg_sq
        denominator = second.sqrt() / correction2**0.5 + group["eps"]
        weight = weight - exp_avg * (lr / correction1) / denominator
        return weight, [exp_avg, exp_avg_sq, *maximum]

    def _loaded_group(self, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        loaded = super()._loaded_group(group, saved)
        if "adam_w_mode" not in saved:  # a file of torch.optim
            loaded["adam_w_mode"] = loaded.pop("decoupled_weight_decay", group["adam_w_mode"])
        return loaded

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if not group["bias_correction"]:
            raise ValueError("bias_correction=False has no counterpart in torch.optim.AdamW")
        same = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "capturable")
        return {
            **{key: group[key] for key in (*same, "foreach", "fused", "differentiable")},
            "decoupled_weight_decay": group["adam_w_mode"],
        }


class FusedSGD(_FusedOptimizer):
    """SGD with momentum (Sutskever et al., 2013), fused: all tensors at once.

    A drop-in for torch.optim.SGD and TransformerEngine's FusedSGD. Differences from torch:
    parameters of float64 or complex dtypes are a TypeError, and `state` also counts steps.

    Args:
        params: parameters (fp32, bf16, fp16, or fp8 as made by fp8_parameter) or groups of them.
        lr: learning rate, a float or a tensor of one element.
        momentum: at least 0; 0 keeps no buffer.
        dampening: of the gradient that enters the buffer; not at its first use.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum; wants momentum > 0 and dampening = 0.
        wd_after_momentum: add weight_decay * p after the momentum instead of before.
        maximize: ascend instead of descend.
        capturable: keep lr on the device, so that a captured CUDA graph follows its changes.
        master_weights: keep an fp32 copy of parameters narrower than fp32, in `state`; fp32
            parameters need none and get none, here and in the next three.
        master_weight_dtype: of that copy: torch.float32 or torch.float16 (block-scaled).
        master_weight_bits: 24 keeps 8 more bits beside a bf16 parameter instead of a copy.
        store_param_remainders: keep 16 more bits beside a bf16 parameter: the exact fp32 master.
        momentum_dtype: dtype of the buffer: None or "fp32", "bf16", "fp16", "fp8", "fp8_e5m2", or
            the torch.dtype; torch.uint8 means fp8. Tensors under 4096 elements keep fp32.
        use_decoupled_grad: read `p.decoupled_grad` instead of `p.grad`.
        stochastic_rounding: round bf16 parameters without a master stochastically.
        materialize_master_grads: accepted for TransformerEngine's sake: gradients of any dtype are
            read as they are, no fp32 copy of them is ever made.
        max_grad_norm: clip the norm of all gradients, after unscaling, to this, as
            torch.nn.utils.clip_grad_norm_ does, without writing to them; `grad_norm` has it then.
        seed: of the stochastic rounding; the same on every replica.
        set_grad_none: deprecated; the default of zero_grad's set_to_none.
        foreach: accepted as None only; there is one implementation.
        fused: accepted as None or True only.
        differentiable: accepted as False only.

    Raises:
        TypeError: a parameter's dtype or layout is unsupported.
        ValueError: a value is out of its range, or two options contradict each other.
    """

    _rule = "SGD"
    _state_names = ("momentum_buffer",)
    _hyperparameters = (
        "maximize",
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "wd_after_momentum",
    )
    _modes = (*_FusedOptimizer._modes, "momentum_dtype")
    _structure = (*_modes, "momentum")
    _switches = (
        *_FusedOptimizer._switches,
        "nesterov",
        "wd_after_momentum",
        "materialize_master_grads",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype | str = torch.float32,
        master_weight_bits: int | None = None,
        store_param_remainders: bool = False,
        momentum_dtype: torch.dtype | str | None = None,
        use_decoupled_grad: bool = False,
        stochastic_rounding: bool = False,
        materialize_master_grads: bool = True,
        max_grad_norm: float | None = None,
        seed: int = 0,
        set_grad_none: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        super().__init__(locals())

    def _validate(self, group: dict[str, Any]) -> None:
        super()._validate(group)
        if not 0 <= _as_number(group["momentum"], "momentum") < math.inf:
            raise ValueError(f"momentum must be finite and at least 0, got {group['momentum']}")
        if not math.isfinite(_as_number(group["dampening"], "dampening")):
            raise ValueError(f"dampening must be finite, got {group['dampening']}")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                "nesterov=True wants momentum > 0 and dampening = 0, got "
                f"momentum={group['momentum']}, dampening={group['dampening']}"
            )
        group["momentum_dtype"] = _as_code(group["momentum_dtype"], "momentum_dtype")

    def _states(self, group: dict[str, Any]) -> tuple[tuple[str, torch.dtype, _Role], ...]:
        if not isinstance(group["momentum"], Tensor) and group["momentum"] == 0:
            return ()  # a tensor may change while nobody looks
        return (("momentum_buffer", group["momentum_dtype"], _Role.MOMENT),)

    def _update(
        self,
        weight: Tensor,
        grad: Tensor,
        states: list[Tensor],
        group: dict[str, Any],
        step: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        decay, after = group["weight_decay"], group["wd_after_momentum"]
        if decay != 0 and not after:
            grad = grad + weight * decay
        if states:
            kept = states[0] * group["momentum"] + grad * (1 - group["dampening"])
            states = [torch.where(step == 1, grad, kept)]
            grad = grad + states[0] * group["momentum"] if group["nesterov"] else states[0]
        if decay != 0 and after:
            grad = grad + weight * decay
        return weight - grad * group["lr"], states

    def _state_is_new(self, param: Tensor) -> None:
        self.state[param]["step"].zero_()  # the first use of the buffer is yet to come

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        super().set_scaled_state(param, state_name, unscaled_state)
        if state_name == "momentum_buffer":
            self.state[param]["step"].clamp_(min=1)  # a buffer that has been used

    def _saved_state(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        # torch.optim.SGD counts no steps: a buffer in its file has been used already.
        saved = {name: value for name, value in saved.items() if value is not None}
        return {"step": float("momentum_buffer" in saved), **saved}

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if group["wd_after_momentum"]:
            raise ValueError("wd_after_momentum=True has no counterpart in torch.optim.SGD")
        same = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return {key: group[key] for key in (*same, "foreach", "fused", "differentiable")}

    def _torch_state(self, param: Tensor, form: _Form) -> dict[str, Any]:
        state = super()._torch_state(param, form)
        used = state.pop("step") > 0
        return state if state and used else {"momentum_buffer": None}


class FusedLion(_FusedOptimizer):
    """Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms"), fused.

    The update is lr * sign(beta1 * m + (1 - beta1) * g), with decoupled weight decay; then
    m = beta2 * m + (1 - beta2) * g.

    Args:
        params: parameters (fp32, bf16, fp16, or fp8 as made by fp8_parameter) or groups of them.
        lr: learning rate, a float or a tensor of one element; a third to a tenth of Adam's.
        betas: of the update and of the moment, each in [0, 1).
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        capturable: keep lr on the device, so that a captured CUDA graph follows its changes.
        master_weights: keep an fp32 copy of parameters narrower than fp32, in `state`; fp32
            parameters need none and get none, here and in the next three.
        master_weight_dtype: of that copy: torch.float32 or torch.float16 (block-scaled).
        master_weight_bits: 24 keeps 8 more bits beside a bf16 parameter instead of a copy.
        store_param_remainders: keep 16 more bits beside a bf16 parameter: the exact fp32 master.
        exp_avg_dtype: dtype of the moment: None or "fp32", "bf16", "fp16", "fp8", "fp8_e5m2", or
            the torch.dtype; torch.uint8 means fp8. Tensors under 4096 elements keep fp32.
        use_decoupled_grad: read `p.decoupled_grad` instead of `p.grad`.
        stochastic_rounding: round bf16 parameters without a master stochastically.
        max_grad_norm: clip the norm of all gradients, after unscaling, to this, as
            torch.nn.utils.clip_grad_norm_ does, without writing to them; `grad_norm` has it then.
        seed: of the stochastic rounding; the same on every replica.
        set_grad_none: deprecated; the default of zero_grad's set_to_none.

    Raises:
        TypeError: a parameter's dtype or layout is unsupported.
        ValueError: a value is out of its range, or two options contradict each other.
    """

    _rule = "Lion"
    _state_names = _always_has = ("exp_avg",)
    _hyperparameters = ("maximize", "lr", "betas", "weight_decay")
    _modes = (*_FusedOptimizer._modes, "exp_avg_dtype")
    _structure = _modes

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype | str = torch.float32,
        master_weight_bits: int | None = None,
        store_param_remainders: bool = False,
        exp_avg_dtype: torch.dtype | str | None = None,
        use_decoupled_grad: bool = False,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        seed: int = 0,
        set_grad_none: bool | None = None,
    ) -> None:
        super().__init__(locals())

    def _validate(self, group: dict[str, Any]) -> None:
        _validate_betas(group)
        group["exp_avg_dtype"] = _as_code(group["exp_avg_dtype"], "exp_avg_dtype")
        super()._validate(group)

    def _states(self, group: dict[str, Any]) -> tuple[tuple[str, torch.dtype, _Role], ...]:
        return (("exp_avg", group["exp_avg_dtype"], _Role.MOMENT),)

    def _update(
        self,
        weight: Tensor,
        grad: Tensor,
        states: list[Tensor],
        group: dict[str, Any],
        step: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        (exp_avg,), (beta1, beta2) = states, group["betas"]
        lr, decay = group["lr"], group["weight_decay"]
        update = beta1 * exp_avg + (1 - beta1) * grad
        sign = update.sign().where(~update.isnan(), update)
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad
        if decay != 0:
            weight = weight - weight * (lr * decay)
        return weight - sign * lr, [exp_avg]

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("torch.optim has no Lion")


# Keys of a group that some optimizers know and others do not.
_KNOWN = [frozenset(cls._hyperparameters) for cls in (FusedAdam, FusedSGD, FusedLion)]
_OF_SOME = frozenset.union(*_KNOWN) - frozenset.intersection(*_KNOWN)
