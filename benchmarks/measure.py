"""Measurements of one step() on one device; nothing here knows which optimizer it measures."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]


@dataclass
class Result:
    """What one step costs; None where a quantity does not apply or could not be measured."""

    device_ms: float | None = None  # on the device, launch gaps between kernels included
    kernel_ms: float | None = None  # sum of the kernels' durations
    share: float | None = None  # of a large copy's bandwidth
    host_us: float | None = None  # until step() returns; the lower of two medians
    # The same after work that empties the host's caches: every gradient made anew, at another
    # address; and others made in their place, so that addresses stay.
    host_new_grads_us: float | None = None
    host_same_grads_us: float | None = None
    launches: float | None = None  # kernels
    copies: float | None = None  # memcpy and memset
    extra_bytes: int | None = None  # peak of the step above what was allocated before
    state_bytes: float | None = None  # per parameter
    signatures: int | None = None  # distinct combinations of dtypes
    error: str = ""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    count = 2**29 if device.type == "cuda" else 2**25
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = time_device(lambda: target.copy_(source), device, queued=5, rounds=9)
    return 2 * 4 * count / seconds


def time_device(step: Step, device: torch.device, queued: int, rounds: int) -> float:
    """Seconds of a step on the device, the median of several rounds.

    On a GPU the device first waits until `queued` steps lie in its queue, so that what is measured
    is the device's work and not the host's.
    """
    if device.type == "cpu":  # The cores may be shared: the fastest step says most.
        return time_host(step, device, rounds, budget=5.0, statistic=min)
    for _ in range(2):
        step()
    host = time_host(step, device, 3)
    times: list[float] = []
    deadline = time.perf_counter() + 2.0
    while len(times) < rounds and (len(times) < 3 or time.perf_counter() < deadline):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        cycles = 2e9 * min(0.3, 50e-6 + 1.5 * queued * host)
        torch.cuda._sleep(int(cycles))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(queued):
            step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / queued)
    return median(times)


def time_host(
    step: Step,
    device: torch.device,
    count: int,
    before: Step = lambda: None,
    budget: float = 1.0,
    statistic: Callable[[list[float]], float] = median,
) -> float:
    """Seconds until step() returns; the device is idle at each call."""
    times: list[float] = []
    deadline = time.perf_counter() + budget
    while len(times) < count and (len(times) < 3 or time.perf_counter() < deadline):
        before()
        synchronize(device)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    synchronize(device)
    return statistic(times)


def time_launches(device: torch.device) -> float:
    """Seconds until two kernels that do nothing are launched: what no step() can be faster than."""

    def launch() -> None:
        for _ in range(2):
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    return time_host(launch, device, 200)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def profile_kernels(step: Step, steps: int = 3) -> tuple[float, float, float]:
    """Kernels, copies, and seconds of both, per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = sum(event["cat"] == "kernel" for event in on_device)
    microseconds = sum(float(event["dur"]) for event in on_device)
    return kernels / steps, (len(on_device) - kernels) / steps, microseconds / steps / 1e6


def peak_extra_bytes(step: Step) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def storage_bytes(value: Any) -> int:
    """Bytes of a tensor, of a wrapper around tensors, or of a container of them."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return sum(storage_bytes(getattr(value, n)) for n in value.__tensor_flatten__()[0])
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(storage_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(storage_bytes, value))
    return 0


def _states(optimizer: Any, param: Tensor) -> dict[str, Any]:
    state = optimizer.state.get(param, {})
    return {k: v for k, v in state.items() if k != "step" and not k.startswith("qmap")}


def state_bytes(optimizer: Any, params: Iterable[Tensor]) -> int:
    return sum(storage_bytes(_states(optimizer, param)) for param in params)


def traffic(optimizer: Any, params: Iterable[Tensor]) -> int:
    """Bytes that must move in a step: each read and each write once.

    A parameter with a floating-point master of its own is only written.
    """
    total = 0
    for param in params:
        states = _states(optimizer, param)
        has_master = any(
            "master" in name and isinstance(value, Tensor) and value.is_floating_point()
            for name, value in states.items()
        )
        total += storage_bytes(param.detach()) * (1 if has_master else 2)
        states.pop(
            "grad", None
        )  # a peer's copy of the gradient: not one of the bytes that must move
        total += storage_bytes(param.grad) + 2 * storage_bytes(states)
    return total


def count_signatures(optimizer: Any, params: Iterable[Tensor]) -> int:
    """Distinct combinations of dtypes, each of which needs a kernel of its own."""
    return len(
        {
            (
                param.dtype,
                None if param.grad is None else param.grad.dtype,
                *(v.dtype for v in _states(optimizer, param).values() if isinstance(v, Tensor)),
            )
            for param in params
        }
    )


def measure(
    optimizer: Any,
    step: Step,
    params: list[Tensor],
    *,
    bandwidth: float,
    gradient_reads: int = 1,
    quick: bool = False,
) -> Result:
    """Measure an optimizer whose parameters have gradients.

    Args:
        optimizer: has `state`.
        step: does one step.
        params: what it updates, all on one device.
        bandwidth: of a copy on that device, in bytes per second.
        gradient_reads: how often a step must read the gradients.
        quick: fewer repetitions.
    """
    device, numel = params[0].device, sum(param.numel() for param in params)
    for _ in range(3):
        step()
    synchronize(device)
    result = Result(state_bytes=state_bytes(optimizer, params) / numel)
    result.signatures = count_signatures(optimizer, params)
    if device.type == "cuda":
        calls = 20 if quick else 200
        host = time_host(step, device, calls)
        launches, copies = 100.0, 0.0
        try:
            launches, copies, kernel_seconds = profile_kernels(step)
            result.launches, result.copies = launches, copies
            result.kernel_ms = 1e3 * kernel_seconds
        except (AssertionError, RuntimeError) as error:  # The other figures need no profiler.
            print(f"launches are not counted: {error}", flush=True)
        result.extra_bytes = peak_extra_bytes(step)
        # A GPU's queue holds about 1000 launches; beyond that the host waits.
        queued = max(1, min(20, int(800 / (launches + copies + 1))))
        seconds = time_device(step, device, queued, 5 if quick else 15)
        # Twice, with time in between: other work on the host can only add to it.
        result.host_us = 1e6 * min(host, time_host(step, device, calls))
        new, same = _time_new_gradients(step, params, 20 if quick else 100)
        result.host_new_grads_us, result.host_same_grads_us = 1e6 * new, 1e6 * same
    else:
        seconds = time_device(step, device, 1, 20 if quick else 100)
    result.device_ms = 1e3 * seconds
    gradients = sum(storage_bytes(param.grad) for param in params)
    moved = traffic(optimizer, params) + (gradient_reads - 1) * gradients
    if getattr(optimizer, "only_gradients", False):
        moved = gradients
    if device.type == "cuda":  # a CPU's caches make a copy's bandwidth no bound
        result.share = moved / seconds / bandwidth
    return result


def _time_new_gradients(step: Step, params: list[Tensor], count: int) -> tuple[float, float]:
    """As `time_host`: after every gradient was made anew, and after as many others were made."""
    kept = [param.grad for param in params]
    others: list[Tensor | None] = [None] * len(params)

    def exchange() -> None:
        # The old one still lives while the new one is made, so their addresses differ.
        for param in params:
            if param.grad is not None:
                param.grad = torch.zeros_like(param.grad)

    def make_others() -> None:
        for i, param in enumerate(params):
            if param.grad is not None:
                others[i] = torch.zeros_like(param.grad)

    try:
        new = time_host(step, params[0].device, count, exchange)
        return new, time_host(step, params[0].device, count, make_others)
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
