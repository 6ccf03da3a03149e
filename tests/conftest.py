"""Fixtures: where a test runs, by which path, from which seed. Knows no optimizer's arithmetic."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
from cases import ROWS, make, new_params

GPU_COUNTS = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GPU_COUNTS] = {"collected": 0, "ran": 0}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[GPU_COUNTS]["collected"] = len(gpu_items)
    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    item.config.stash[GPU_COUNTS]["ran"] += item.get_closest_marker("gpu") is not None
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    counts = config.stash[GPU_COUNTS]
    missing = counts["collected"] - counts["ran"]
    terminalreporter.write_line(f"{missing} tests need a GPU and did not run")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def built() -> set[str]:
    """Device types whose kernels have been built."""
    return set()


@pytest.fixture
def native(device: torch.device, built: set[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiled path, and what optimizer.backend then has to say."""
    return compiled_path(device, built, monkeypatch)


@pytest.fixture
def cuda(built: set[str], monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """For tests that make sense on a GPU only: the device, with the compiled path."""
    device = torch.device("cuda")
    compiled_path(device, built, monkeypatch)
    return device


def compiled_path(device: torch.device, built: set[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("FUSEDOPT_BACKEND", raising=False)
    if device.type not in built:
        built.add(device.type)
        build_side_by_side(device)
    return device.type


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of plain PyTorch operations, and what optimizer.backend then has to say."""
    monkeypatch.setenv("FUSEDOPT_BACKEND", "torch")
    return "torch"


@pytest.fixture(params=["native", "plain"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both paths in turn; tests compare this with optimizer.backend, so none is taken silently."""
    name = request.getfixturevalue(request.param)
    assert isinstance(name, str)
    return name


def build_side_by_side(device: torch.device) -> None:
    """Compile the kernels of the whole table, as many at once as there are cores."""
    width = os.cpu_count() or 1
    for name in dict.fromkeys(row.fused for row in ROWS):
        of_class = [row for row in ROWS if row.fused == name]
        for start in range(0, len(of_class), width):
            rows = of_class[start : start + width]
            # A failure is remembered, and shows in every test that needs the kernel.
            with contextlib.suppress(Exception):
                groups = [
                    dict(row.kwargs, params=new_params(row, device, [(1,), (4096,)]))
                    for row in rows
                ]
                make(rows[0], groups).init_state()
