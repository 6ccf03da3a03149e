"""The loader, tried on folders of tiny sources, and twice on copies of the real ones."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedopt

STEP = """
#include "fusedopt.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""
SOURCES = {
    "fusedopt.h": "#ifndef ANSWER\n#define ANSWER 42\n#endif\n",
    "step.cpp": STEP,
    "step.cu": "#include <cuda_runtime.h>\n__global__ void nothing() {}\n"
    + STEP
    + 'extern "C" __attribute__((visibility("default"))) int launch() {\n'
    "  nothing<<<1, 1>>>();\n  return cudaDeviceSynchronize();\n}\n",
    "bindings.cpp": """
#include <Python.h>
#include "fusedopt.h"
#ifdef FUSEDOPT_CUDA
#include <cuda_runtime_api.h>
#include <c10/cuda/CUDAStream.h>
#endif
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "bindings", nullptr, -1, nullptr};
#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  PyObject* made = PyModule_Create(&module);
#ifdef FUSEDOPT_CUDA
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  PyModule_AddIntConstant(made, "runtime", runtime);
#endif
  PyModule_AddIntConstant(made, "answer", ANSWER);
  return made;
}
""",
}
KERNEL = ("step", "cpu", ("step.cpp",))
COUNTER = itertools.count()


class Project:
    """A folder with a copy of the module and tiny sources beside it."""

    def __init__(self, root: Path, name: str = "fusedopt", sources: str = "cuda") -> None:
        self.file = root / f"{name}.py"
        self.sources = root / sources
        self.sources.mkdir(parents=True)
        shutil.copy(fusedopt.__file__, self.file)
        for file, text in SOURCES.items():
            (self.sources / file).write_text(text)

    def module(self) -> Any:
        """Import a further copy, with nothing remembered: what a new process would see."""
        return fusedopt._import_file(f"{self.file.stem}{next(COUNTER)}", self.file)

    def built(self) -> Path:
        """Build the kernel without loading it: what is loaded once stays loaded."""
        binary = self.module()._Binary(self.sources, *KERNEL, (), False)
        path = binary.build()
        assert isinstance(path, Path)
        return path

    def answer(self, *defines: str) -> int:
        kernel = self.module()._load(*KERNEL, defines, python_module=False)
        assert isinstance(kernel, ctypes.CDLL)
        return int(kernel.answer())


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no setting from outside."""
    for name in ("FUSEDOPT_BACKEND", "FUSEDOPT_VERBOSE", "TORCH_CUDA_ARCH_LIST", "CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "cache"
    monkeypatch.setenv("FUSEDOPT_CACHE_DIR", str(path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return path


@pytest.fixture
def project(tmp_path: Path, cache: Path) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture
def compiles(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the compilations from here on."""
    log = tmp_path / "compiles"
    log.touch()
    compiler = script(
        tmp_path / "bin" / "g++",
        f'case " $* " in *" -c "*) echo "$$" >> "{log}";; esac\nexec "{shutil.which("c++")}" "$@"',
    )
    monkeypatch.setenv("CXX", str(compiler))
    return lambda: len(log.read_text().splitlines())


@pytest.fixture
def no_tools(tmp_path: Path) -> Callable[[pytest.MonkeyPatch], None]:
    """Take away everything on PATH."""
    (tmp_path / "empty").mkdir()
    return lambda patch: patch.setenv("PATH", str(tmp_path / "empty"))


def needs_nvcc() -> None:
    if fusedopt._find_cuda_home() is None:
        pytest.skip("no nvcc that fits torch: " + "; ".join(fusedopt._search_cuda_home()[1]))


# Row 35 of the cases: leftovers.


def test_killed_build_blocks_nobody(
    project: Project, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(project.file.parent)!r})
        import fusedopt
        fusedopt._load(*{KERNEL!r}, python_module=False)
    """
    slow = script(tmp_path / "slow" / "g++", 'case " $* " in *" -c "*) exec sleep 20;; esac')
    environment = os.environ | {"CXX": str(slow)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    victim = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not list(cache.glob("*.build-*/build.ninja")):
            assert victim.poll() is None, "the build ended before it could be killed"
            assert time.monotonic() < deadline, "the build did not start"
            time.sleep(0.02)
        victim.kill()  # Only Python; the compiler it started lives on for now.
        victim.wait()
        start = time.monotonic()
        assert project.answer() == 42
        assert time.monotonic() - start < 10
        assert not list(cache.glob("*.build-*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()


def test_foreign_leftovers_are_ignored(project: Project, cache: Path) -> None:
    built = project.built()
    built.unlink()
    half = cache / f"{built.stem}.build-dead"
    half.mkdir()
    for name in ("lock", "build.ninja", built.name):
        (half / name).write_text("half")
    (cache / "lock").touch()
    assert project.answer() == 42
    assert built.exists()
    assert not half.exists()


@pytest.mark.parametrize("size", [0, 10, 100, 0.5, 0.99])
def test_truncated_binary_is_built_anew(project: Project, size: float) -> None:
    built = project.built()
    whole = built.stat().st_size
    os.truncate(built, int(size * whole) if size < 1 else int(size))
    assert project.answer() == 42
    assert built.stat().st_size == whole


def test_unloadable_binary_is_named(project: Project) -> None:
    built = project.built()
    shutil.copy(shutil.which("true") or "", built)  # An executable, not a library.
    with pytest.raises(RuntimeError, match=f"delete {built}") as caught:
        project.answer()
    assert isinstance(caught.value.__cause__, OSError)


# Row 36: many at once.


def test_processes_and_threads_share_one_compile(
    project: Project, compiles: Callable[[], int]
) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(project.file.parent)!r})
        import fusedopt
        from concurrent.futures import ThreadPoolExecutor
        def work(i):
            return fusedopt._load(*{KERNEL!r}, (f"ANSWER={{i % 2}}",), python_module=False).answer()
        with ThreadPoolExecutor(4) as pool:
            print(*pool.map(work, range(4)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0].split() for process in running] == [["0", "1", "0", "1"]] * 4
    assert compiles() == 2  # One per signature.


def test_threads_get_one_object_and_compile_once(
    project: Project, compiles: Callable[[], int]
) -> None:
    module = project.module()
    with ThreadPoolExecutor(4) as pool:
        kernels = list(
            pool.map(lambda _: module._load(*KERNEL, python_module=False), range(4)),
        )
    assert all(kernel is kernels[0] for kernel in kernels)
    assert compiles() == 1


def test_signatures_compile_in_parallel(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each compiler waits until the other one runs, too.
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    wait = f"""case " $* " in *" -c "*)
        touch "{meeting}/$$"
        for i in $(seq 200); do
            [ "$(ls "{meeting}" | wc -l)" -ge 2 ] && break
            [ "$i" = 200 ] && echo "error: alone" && exit 1
            sleep 0.05
        done;;
    esac
    exec "{shutil.which("c++")}" "$@" """
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "g++", wait)))
    module = project.module()

    def work(i: int) -> int:
        return int(module._load(*KERNEL, (f"ANSWER={i}",), python_module=False).answer())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [0, 1]


# Row 37: where it is kept.


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that cannot even be made, as the chosen one."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDOPT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def test_unwritable_cache_is_replaced_and_named(
    project: Project, unwritable: Path, tmp_path: Path
) -> None:
    module = project.module()
    fallback = tmp_path / f"fusedopt-{os.getuid()}"
    with pytest.warns(module.FusedOptWarning, match=f"{unwritable}.*{fallback}"):
        one = module._load(*KERNEL, ("ANSWER=1",), python_module=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Said once.
        two = module._load(*KERNEL, ("ANSWER=2",), python_module=False)
    assert (one.answer(), two.answer()) == (1, 2)
    assert len(list(fallback.glob("*.so"))) == 2
    assert fallback.stat().st_mode & 0o077 == 0


def test_a_cache_that_does_not_exist_yet_is_made(
    project: Project, unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the same was built in the fallback before."""
    module = project.module()
    with pytest.warns(module.FusedOptWarning):
        module._load(*KERNEL, ("ANSWER=1",), python_module=False)
    monkeypatch.setenv("FUSEDOPT_CACHE_DIR", str(tmp_path / "new" / "cache"))
    project.module()._load(*KERNEL, ("ANSWER=1",), python_module=False)
    assert len(list((tmp_path / "new" / "cache").glob("*.so"))) == 1


def test_fallback_that_others_can_write_is_refused(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDOPT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    fallback = tmp_path / f"fusedopt-{os.getuid()}"
    fallback.mkdir()
    fallback.chmod(0o777)
    with pytest.raises(RuntimeError, match=r"others can write it.*set FUSEDOPT_CACHE_DIR"):
        project.answer()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FUSEDOPT_CACHE_DIR": "a", "TORCH_EXTENSIONS_DIR": "b", "XDG_CACHE_HOME": "c"}, "a"),
        ({"TORCH_EXTENSIONS_DIR": "b", "XDG_CACHE_HOME": "c"}, "b/fusedopt"),
        ({"XDG_CACHE_HOME": "c", "HOME": "d"}, "c/fusedopt"),
        ({"HOME": "d"}, "d/.cache/fusedopt"),
    ],
)
def test_order_of_cache_directories(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    expected: str,
) -> None:
    for name in ("FUSEDOPT_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert fusedopt._cache_dir() == tmp_path / expected


@pytest.mark.parametrize("where", ["prebuilt", "cache"])
def test_prebuilt_needs_no_tools_and_writes_nothing(
    project: Project,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_tools: Callable[[pytest.MonkeyPatch], None],
    where: str,
) -> None:
    bindings = ("bindings", "cpu", ("bindings.cpp",))
    project.module()._load(*bindings, python_module=True)
    assert project.answer() == 42
    if where == "prebuilt":
        cache.rename(project.sources / "prebuilt")
    root = project.file.parent.parent
    before = sorted(root.rglob("*"))
    for path in [root, *before]:
        path.chmod(0o555)
    try:
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            no_tools(patch)
            module = project.module()
            start = time.perf_counter()
            assert module._load(*bindings, python_module=True).answer == 42
            assert module._load(*KERNEL, python_module=False).answer() == 42
            assert time.perf_counter() - start < 0.5
            assert module._backend_for("cpu") == "cpu"
    finally:
        for path in [root, *before]:
            path.chmod(0o755)
    assert [path for path in sorted(root.rglob("*")) if "__pycache__" not in str(path)] == before


# Row 38: never a stale binary.


def test_edited_source_is_compiled(project: Project, compiles: Callable[[], int]) -> None:
    assert project.answer() == 42
    assert project.answer() == 42
    assert compiles() == 1
    (project.sources / "fusedopt.h").write_text("#define ANSWER 43\n")
    assert project.answer() == 43
    (project.sources / "fusedopt.h").write_text(SOURCES["fusedopt.h"])
    assert project.answer() == 42
    assert compiles() == 2


def test_source_edited_during_the_compile_is_not_kept(
    project: Project, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = project.sources / "fusedopt.h"
    edit = f"""case " $* " in *" -c "*) echo "#define ANSWER 7" > "{header}";; esac
    exec "{shutil.which("c++")}" "$@" """
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "g++", edit)))
    with pytest.raises(RuntimeError, match="changed while it was compiled"):
        project.answer()
    assert not list(cache.glob("*.so"))
    assert project.answer() == 7


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("torch.__version__", "9.9.9"),
        ("torch.version.cuda", "99.0"),
        ("sysconfig.get_config_var", lambda name: ".other-abi.so"),
    ],
)
def test_other_torch_or_python_is_another_binary(
    project: Project, monkeypatch: pytest.MonkeyPatch, target: str, value: object
) -> None:
    module = project.module()
    for backend, source, is_module in [
        ("cpu", "step.cpp", False),
        ("cuda", "step.cu", False),
        ("cuda", "bindings.cpp", True),
    ]:
        binary = module._Binary(project.sources, "x", backend, (source,), (), is_module)
        before = binary.stem()
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            assert binary.stem() != before
        assert binary.stem() == before


def test_other_cpu_is_another_binary(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    module = project.module()
    kernel = module._Binary(project.sources, *KERNEL, (), False)
    bindings = module._Binary(project.sources, "bindings", "cpu", ("bindings.cpp",), (), True)
    stems = kernel.stem(), bindings.stem()
    monkeypatch.setattr(module, "_cpu_identity", lambda: "another")
    assert kernel.stem() != stems[0]
    assert bindings.stem() == stems[1]  # Compiled for any CPU of the kind.


def test_architectures(project: Project, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = project.module()
    kernel = module._Binary(project.sources, "step", "cuda", ("step.cu",), (), False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0 8.0;10.0+PTX")
    assert set(kernel.archs()) == {"80", "90", "100+PTX"}
    cache.mkdir()
    built = cache / f"{kernel.stem()}.80.90.so"
    shutil.copy(torch._C.__file__, built)  # Any library will do: it is only looked for.
    for archs, found in [("9.0", built), ("8.0;9.0", built), ("9.0+PTX", None), ("10.0", None)]:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
        assert kernel.find() == found
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(RuntimeError, match=r"'Hopper' is not like 9\.0"):
        kernel.find()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(9, 0), (8, 0), (9, 0)][i])
    assert kernel.find() == built
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="set TORCH_CUDA_ARCH_LIST"):
        module._load("step", "cuda", ("step.cu",), python_module=False)


# Row 39: the toolkit.


def toolkit(home: Path, release: str = "13.0", headers: bool = True) -> Path:
    """Make something that passes for a toolkit: its nvcc tells where it lies."""
    script(
        home / "bin" / "nvcc",
        f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.1";; '
        f"*) echo '#$ _HERE_={home}/bin' >&2;; esac",
    )
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcudart.so.13").touch()
    if headers:
        (home / "include").mkdir()
        (home / "include" / "cuda_runtime.h").touch()
    return home


@pytest.fixture
def cuda(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module for CUDA 13, a good toolkit, and nothing that leads to it yet."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    toolkit(tmp_path / "good one")
    return project.module()


@pytest.mark.parametrize("kind", ["script", "link", "link to script", "plain"])
@pytest.mark.parametrize("home", [None, "/nonexistent", "old", "no headers"])
def test_toolkit_behind_nvcc(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, home: str | None
) -> None:
    good, first = tmp_path / "good one", tmp_path / "first"
    toolkit(tmp_path / "old", "12.8")
    toolkit(tmp_path / "no headers", headers=False)
    if home:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
    real = good / "bin" / "nvcc"
    shim = script(tmp_path / "shims" / "nvcc", f'exec "{real}" "$@"')
    first.mkdir()
    if kind == "script":
        first = shim.parent
    elif kind == "plain":
        first = real.parent
    else:
        (first / "nvcc").symlink_to(real if kind == "link" else shim)
    monkeypatch.setenv("PATH", str(first), prepend=os.pathsep)
    assert cuda._find_cuda_home() == good
    reasons = {"/nonexistent": "does not exist", "old": "CUDA 12.8", "no headers": "no include"}
    rejected = cuda._search_cuda_home()[1]
    assert [reasons[home] in text for text in rejected] == [True] if home else rejected == ()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_named_by_a_variable_wins(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    other = toolkit(tmp_path / "other")
    monkeypatch.setenv("PATH", str(other / "bin"), prepend=os.pathsep)
    monkeypatch.setenv(variable, str(tmp_path / "good one"))
    assert cuda._find_cuda_home() == tmp_path / "good one"


def test_toolkits_of_pip_and_conda(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "site" / "torch" / "__init__.py"))
    monkeypatch.setenv("PATH", "/nonexistent")
    pip = toolkit(tmp_path / "site" / "nvidia" / "cu13")
    assert cuda._find_cuda_home() == pip
    conda = toolkit(tmp_path / "conda", headers=False)
    include = conda / "targets" / "x86_64-linux" / "include"
    include.mkdir(parents=True)
    (include / "cuda_runtime.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(conda))
    cuda._search_cuda_home.cache_clear()
    assert cuda._find_cuda_home() == conda


def test_one_error_lists_every_place(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")  # Nobody has that.
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    broken = toolkit(tmp_path / "broken", headers=True)
    script(broken / "bin" / "nvcc", "exit 1")
    monkeypatch.setenv("CUDA_PATH", str(broken))
    shim = script(tmp_path / "shims" / "nvcc", f'exec "{tmp_path}/good one/bin/nvcc" "$@"')
    monkeypatch.setenv("PATH", str(shim.parent), prepend=os.pathsep)
    assert cuda._find_cuda_home() is None
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    with pytest.raises(RuntimeError, match=r'no nvcc for CUDA 99\.0: `pip install "fusedopt') as e:
        cuda._load("step", "cuda", ("step.cu",), python_module=False)
    for place in (
        f"$CUDA_HOME {tmp_path}/gone: does not exist",
        f"$CUDA_PATH {broken}: bin/nvcc does not run",
        f"behind nvcc {tmp_path}/good one: is CUDA 13.0, but torch is built for 99.0",
        "nvidia/cu99: does not exist",
        "/opt/cuda",
    ):
        assert place in str(e.value)


@pytest.mark.parametrize("folder", ["plain", "with späce"])
def test_cuda_compiles_without_a_gpu(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    needs_nvcc()
    project = Project(tmp_path / folder)
    home = tmp_path / folder / "toolkit"
    home.symlink_to(fusedopt._find_cuda_home() or "")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    module = project.module()
    assert module._find_cuda_home() == home
    assert module._load("step", "cuda", ("step.cu",), python_module=False).answer() == 42
    (built,) = cache.glob("*.so")
    assert built.name.endswith(".80.90+PTX.so")
    for code in (b"sm_80", b"sm_90", b"compute_90"):
        assert code in built.read_bytes()
    bindings = module._load("bindings", "cuda", ("bindings.cpp",), python_module=True)
    assert bindings.answer == 42
    assert bindings.runtime // 1000 == int(str(torch.version.cuda).split(".")[0])


@pytest.mark.gpu
def test_cuda_kernel_runs(project: Project) -> None:
    needs_nvcc()
    module = project.module()
    assert module._backend_for("cuda") == "cuda"
    assert module._load("step", "cuda", ("step.cu",), python_module=False).launch() == 0


# Row 40: names, copies.


@pytest.mark.parametrize(
    "name", ["sp ace", "ümläut-日本", 'it\'s (a) "$HOME" & more; #x', "a:b,c=d"]
)
@pytest.mark.parametrize("sources", ["cuda", "fusedopt_cuda"])
def test_any_path_works(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, sources: str
) -> None:
    project = Project(tmp_path / name, "my_optimizers", sources)
    monkeypatch.setenv("FUSEDOPT_CACHE_DIR", str(tmp_path / f"cache {name}"))
    assert project.answer() == 42
    bindings = project.module()._load("bindings", "cpu", ("bindings.cpp",), python_module=True)
    assert bindings.answer == 42
    assert len(list((tmp_path / f"cache {name}").glob("*.so"))) == 2


def test_define_with_odd_characters(project: Project) -> None:
    assert project.answer("ANSWER=(\"a b'c\"[2] == 'b' ? 5 : 6)") == 5


@pytest.mark.parametrize("same", [True, False])
def test_two_copies_in_one_process(tmp_path: Path, cache: Path, same: bool) -> None:
    first, second = Project(tmp_path / "one"), Project(tmp_path / "two", "renamed")
    if not same:
        (second.sources / "fusedopt.h").write_text("#define ANSWER 43\n")
    names = set(sys.modules)
    modules = first.module(), second.module()
    expected = [42, 42 if same else 43]
    kernels = [module._load(*KERNEL, python_module=False) for module in modules]
    bindings = [
        module._load("bindings", "cpu", ("bindings.cpp",), python_module=True) for module in modules
    ]
    assert [kernel.answer() for kernel in kernels] == expected
    assert [binding.answer for binding in bindings] == expected
    assert all(name.startswith("fusedopt_bindings_cpu_") for name in set(sys.modules) - names)
    assert len(list(cache.glob("*.so"))) == (2 if same else 4)


def test_two_copies_step_in_one_process(tmp_path: Path, cache: Path) -> None:
    """As they are, with classes that pybind11 would take for one another."""
    root = Path(fusedopt.__file__).parent
    sources = next(root / name for name in ("cuda", "fusedopt_cuda") if (root / name).is_dir())
    stepped = []
    for name in ("one", "two"):
        shutil.copytree(sources, tmp_path / name / "cuda")
        shutil.copy(fusedopt.__file__, tmp_path / name / f"{name}.py")
        with (tmp_path / name / "cuda" / "bindings.cpp").open("a") as file:
            file.write(f"// {name}\n")  # another binary
        module: Any = fusedopt._import_file(name, tmp_path / name / f"{name}.py")
        param = torch.nn.Parameter(torch.ones(8))
        param.grad = torch.ones_like(param)
        optimizer = module.FusedSGD([param], lr=0.5)
        stepped.append((optimizer, param))
    for optimizer, _ in stepped * 2:
        optimizer.step()
        assert optimizer.backend == "cpu"
    assert all(torch.equal(param, torch.zeros(8)) for _, param in stepped)


def test_the_file_alone_steps(tmp_path: Path) -> None:
    shutil.copy(fusedopt.__file__, tmp_path / "alone.py")
    module: Any = fusedopt._import_file("alone", tmp_path / "alone.py")
    param = torch.nn.Parameter(torch.ones(5000))
    param.grad = torch.ones_like(param)
    optimizer = module.FusedAdam([param], lr=0.5, exp_avg_dtype="fp8")
    with pytest.warns(module.FusedOptWarning, match="no sources: copy fusedopt's folder cuda/"):
        optimizer.step()
    assert optimizer.backend == "torch"
    torch.testing.assert_close(param.detach(), torch.full((5000,), 0.5))


def test_nvidia_package_is_not_taken_for_sources(project: Project, cache: Path) -> None:
    project.sources.rename(project.file.parent / "fusedopt_cuda")
    (project.file.parent / "cuda" / "bindings").mkdir(parents=True)
    assert project.module()._source_dir() == project.file.parent / "fusedopt_cuda"


# Row 41: tools missing, and what is asked for.


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("compiler", "no C++ compiler c++: `apt install g++`"),
        ("ninja", "no ninja: `pip install ninja`"),
        ("setuptools", "no setuptools: `pip install setuptools`"),
        ("Python.h", "no Python.h: `apt install python3-dev`"),
        ("sources", "no sources: copy fusedopt's folder cuda/ into"),
    ],
)
def test_torch_path_with_one_warning(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, reason: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in {"c++", "ninja"} - {"c++" if lacks == "compiler" else lacks}:
        (tools / tool).symlink_to(shutil.which(tool) or "")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if lacks == "Python.h":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    if lacks == "setuptools":
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == lacks else find(name)
        )
    if lacks == "sources":
        shutil.rmtree(project.sources)
    module = project.module()
    with pytest.warns(module.FusedOptWarning) as caught:
        assert module._backend_for("cpu") == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Said once.
        assert module._backend_for("cpu") == "torch"
    assert len(caught) == 1
    text = str(caught[0].message)
    assert reason in text
    assert text.count("no ") == 1
    assert "FUSEDOPT_BACKEND=torch" in text
    with pytest.raises(module.BuildError) as failed:
        module._load(*KERNEL, python_module=False)
    assert reason in str(failed.value)
    monkeypatch.setenv("FUSEDOPT_BACKEND", "cpu")
    with pytest.raises(module.BuildError, match="FUSEDOPT_BACKEND=cpu is not possible") as failed:
        module._backend_for("cpu")
    assert reason in str(failed.value)


def test_cuda_without_nvcc(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.warns(cuda.FusedOptWarning, match=r'no nvcc.*`pip install "fusedopt\[nvcc\]"`'):
        assert cuda._backend_for("cuda") == "torch"
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(cuda.FusedOptWarning, match="is built without CUDA"):
        assert cuda._backend_for("cuda") == "torch"
    monkeypatch.setenv("FUSEDOPT_BACKEND", "cuda")
    with pytest.raises(cuda.BuildError, match="is built without CUDA"):
        cuda._backend_for("cuda")


def test_ninja_beside_python_but_not_on_path(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_tools: Callable[[pytest.MonkeyPatch], None],
) -> None:
    no_tools(monkeypatch)
    script(tmp_path / "venv" / "ninja", "exit 0")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    assert f"put {tmp_path}/venv on PATH" in project.module()._missing("cpu")


def test_forced_backend(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    module = project.module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module._backend_for("cpu") == "cpu"
        for value, device_type in [("cpu", "cpu"), ("torch", "cpu"), ("torch", "meta")]:
            monkeypatch.setenv("FUSEDOPT_BACKEND", value)
            assert module._backend_for(device_type) == value
    for value, device_type in [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "meta")]:
        monkeypatch.setenv("FUSEDOPT_BACKEND", value)
        with pytest.raises(RuntimeError, match=f"={value} cannot update {device_type} tensors"):
            module._backend_for(device_type)
    for value in ("gpu", "CUDA", "cuda "):
        monkeypatch.setenv("FUSEDOPT_BACKEND", value)
        with pytest.raises(ValueError, match=f"must be cuda, cpu or torch, got '{value}'"):
            module._backend_for("cpu")


def test_other_devices_warn(project: Project) -> None:
    module = project.module()
    with pytest.warns(module.FusedOptWarning, match="kernels for cuda and cpu, not for meta"):
        assert module._backend_for("meta") == "torch"


# Failing builds, and what is said meanwhile.


def test_compile_error(project: Project, cache: Path, compiles: Callable[[], int]) -> None:
    (project.sources / "step.cpp").write_text('#include "fusedopt.h"\nint x = y;\n')
    module = project.module()
    with pytest.raises(module.BuildError) as caught:
        module._load(*KERNEL, python_module=False)
    error, text = caught.value, str(caught.value)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, RuntimeError)
    assert f"step (cpu) of {project.sources} did not compile" in text
    assert re.search(r"step\.cpp:2:9: error: \W*y\W* was not declared", text)
    assert "ninja: build stopped" in text
    assert "FUSEDOPT_BACKEND=torch" in text
    (log,) = cache.glob("*.log")
    assert f"Full log: {log}\n" in text
    assert "-fno-math-errno" in log.read_text()
    with pytest.raises(module.BuildError) as again:
        module._load(*KERNEL, python_module=False)
    assert again.value is error
    assert compiles() == 1
    assert not list(cache.glob("*.build-*"))
    other = project.module()  # Its failure is its own, and as full.
    with pytest.raises(other.BuildError, match="was not declared"):
        other._load(*KERNEL, python_module=False)
    (project.sources / "step.cpp").write_text(SOURCES["step.cpp"])
    assert project.answer() == 42


@pytest.mark.parametrize(
    ("printed", "fix"),
    [
        ("x.h:1:2: error: #error -- unsupported GNU version!", "set CXX and CC to an older g++"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_121'", "set TORCH_CUDA_ARCH_LIST"),
        ("fatal error: error writing to x.s: No space left on device", "free disk space"),
        ("fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("error: whatever", "correct the source"),
    ],
)
def test_fix_follows_from_the_output(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, fix: str
) -> None:
    text = f'case " $* " in *" -c "*) echo "{printed}"; exit 1;; esac\nexec c++ "$@"'
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "g++", text)))
    with pytest.raises(RuntimeError) as caught:
        project.answer()
    assert f"\n  {printed}\n  ..." in str(caught.value)
    assert f"Fix: {fix}" in str(caught.value) or f"Fix: the compiler {fix}" in str(caught.value)


def test_quiet_but_logged(
    project: Project, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        project.answer()
    ours = [record.getMessage() for record in caplog.records if record.name == "fusedopt"]
    assert len(ours) == 1
    assert ours[0].startswith("compiling step for cpu into ")
    assert len(caplog.records) == 1
    assert capfd.readouterr() == ("", "")


def test_verbose(
    project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDOPT_VERBOSE", "1")
    project.answer()
    assert "-march=native" in capfd.readouterr().out


def test_import_touches_nothing(project: Project, tmp_path: Path) -> None:
    code = f"""
        import sys
        import torch
        from pathlib import Path
        sys.path.insert(0, {str(project.file.parent)!r})
        sys.dont_write_bytecode = True
        def seen():
            files = sorted(Path({str(tmp_path)!r}).rglob("*"))
            return files, "torch.utils.cpp_extension" in sys.modules, torch.cuda.is_initialized()
        before = seen()
        def forbid(event, args):
            if event in ("subprocess.Popen", "os.posix_spawn", "os.mkdir", "ctypes.dlopen"):
                raise AssertionError(event)
        sys.addaudithook(forbid)
        import fusedopt
        assert seen() == before
        assert not torch.cuda.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_step_imports_no_dynamo() -> None:
    """Which takes a second or more, and torch's own optimizers import it."""
    program = """
import sys, torch, fusedopt
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
optimizer = fusedopt.FusedAdam([p])
optimizer.step()
optimizer.zero_grad()
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {"FUSEDOPT_BACKEND": "torch", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
