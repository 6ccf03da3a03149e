"""The CUDA sources compile for every architecture that is promised.

Where it counts, in tiles that are whole, at most one register is spilled.
"""

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fusedopt

ARCHITECTURES = ("80", "90", "100")
# One of each kind of stream and of each relation of parameter and master.
SIGNATURES = (
    ("Adam", "F32", "F32", "None", False, ("F32", "F32")),
    ("Adam", "F32", "F32", "None", False, ("F32", "F32", "F32")),
    ("Adam", "F32", "F32", "None", False, ("E4M3", "E4M3")),
    ("Adam", "BF16", "BF16", "None", True, ("BF16", "BF16")),
    ("Adam", "BF16", "BF16", "None", False, ("E4M3", "E4M3")),
    ("Adam", "BF16", "BF16", "F32", False, ("F32", "F32")),
    ("Adam", "BF16", "BF16", "F32", False, ("BF16", "BF16")),
    ("Adam", "BF16", "BF16", "F32", False, ("E4M3", "E4M3")),
    ("Adam", "F16", "F16", "F32", False, ("F16", "F16")),
    ("Adam", "BF16", "F32", "F16", False, ("E4M3", "E4M3")),
    ("Adam", "BF16", "BF16", "Remainder16", False, ("F32", "F32")),
    ("Adam", "BF16", "BF16", "Remainder16", False, ("BF16", "BF16")),
    ("Adam", "BF16", "BF16", "Remainder16", False, ("E4M3", "E5M2")),
    ("Adam", "BF16", "BF16", "Remainder8", False, ("E4M3", "E4M3")),
    ("Adam", "BF16", "BF16", "Remainder8", False, ("F32", "E4M3", "E4M3")),
    ("Adam", "E4M3", "BF16", "F32", False, ("BF16", "BF16")),
    ("Adam", "E4M3", "BF16", "F32", False, ("E4M3", "E4M3")),
    ("SGD", "BF16", "BF16", "F32", False, ("F32",)),
    ("Lion", "BF16", "BF16", "Remainder16", False, ("E4M3",)),
)


def compile_report(source: str, defines: tuple[str, ...], home: Path, target: Path) -> str:
    """What ptxas says of one source, compiled for every architecture."""
    command = [
        str(home / "bin" / "nvcc"),
        *("-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", "-cubin", "-Werror=all-warnings"),
        *(f"-D{define}" for define in defines),
        source,
    ]
    report = ""
    for architecture in ARCHITECTURES:
        arch = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
        output = ["-o", str(target / f"{architecture}.cubin")]
        folder = Path(fusedopt.__file__).parent / "cuda"
        done = subprocess.run(
            [*command, arch, *output], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
        report += done.stderr
    return report


def check_spills(report: str, kernel: str) -> None:
    compiled = set(re.findall(rf"{kernel}.*' for 'sm_(\d+)'", report))
    assert compiled == set(ARCHITECTURES), report
    # What is loaded again: a call of what is seldom needed stores its return address.
    spills = re.findall(
        rf"Function properties for \S*{kernel}\S*\n.* (\d+) bytes spill loads", report
    )
    assert len(spills) == len(ARCHITECTURES), report
    assert max(map(int, spills)) <= 4, report


def test_every_architecture_compiles_and_hardly_spills(tmp_path: Path) -> None:
    home = fusedopt._find_cuda_home()
    if home is None:
        pytest.skip("no CUDA toolkit of torch's major version on this machine")
    units = [
        ("step.cu", fusedopt._Signature(*row).defines(), "update_kernel") for row in SIGNATURES
    ]
    units += [("gradients.cu", (), "norm_kernel"), ("gradients.cu", (), "clip_kernel")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        for i, (source, defines, _) in enumerate(units):
            folder = tmp_path / str(i)
            folder.mkdir()
            jobs.append(pool.submit(compile_report, source, tuple(defines), home, folder))
    for job, (_, _, kernel) in zip(jobs, units, strict=True):
        check_spills(job.result(), kernel)
