"""What each source file may use: torch at the border, launches in the loop over memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fusedopt

ROOT = Path(fusedopt.__file__).resolve().parent
SOURCES = sorted(path for path in (ROOT / "cuda").iterdir() if path.suffix.startswith((".c", ".h")))


def code_of(path: Path) -> str:
    return re.sub(r"//[^\n]*", "", path.read_text())


def test_there_are_sources() -> None:
    names = {path.name for path in SOURCES}
    assert {"bindings.cpp", "multi_tensor.cuh", "update_rules.cuh", "gradients.cuh"} <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_layers(path: Path) -> None:
    code = code_of(path)
    if path.name != "bindings.cpp":
        assert not re.findall(r'#\s*include\s*[<"](?:torch|ATen|pybind11)/', code)
    if path.name not in ("multi_tensor.cuh", "gradients.cuh"):
        assert "<<<" not in code
    assert "torch/extension.h" not in code
    assert "ATen/cuda/CUDAContext.h" not in code


def test_rules_see_no_pointer_and_no_dtype() -> None:
    code = code_of(ROOT / "cuda" / "update_rules.cuh")
    assert not re.search(r"(void|float|int\d*_t)\s*\*|TensorRow|Storage|threadIdx|blockIdx", code)


def test_files_say_what_they_are() -> None:
    for path in SOURCES:
        assert path.read_text().startswith("//"), path.name


def test_every_macro_of_a_signature_is_read() -> None:
    """What fusedopt.py defines for a kernel library is what step.cu reads."""
    signature = fusedopt._Signature("Adam", "F32", "F32", "None", False, ("F32", "F32", "F32"))
    defined = {define.split("=")[0] for define in signature.defines()}
    read = set(re.findall(r"\bFUSEDOPT_[A-Z0-9]+\b", code_of(ROOT / "cuda" / "step.cu")))
    assert defined == read


def test_the_module_imports_nothing_of_ours() -> None:
    """It has to work when copied alone."""
    imported = re.findall(r"^\s*(?:from|import) +(\w+)", (ROOT / "fusedopt.py").read_text(), re.M)
    assert not {"cases", "train", "conf", "benchmarks", "cuda", "fusedopt_cuda"} & set(imported)
    assert not {"transformer_engine", "hydra", "omegaconf", "numpy", "ninja"} & set(imported)
