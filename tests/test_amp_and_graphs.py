"""Loss scaling and skipped steps; CUDA graphs; what a step costs in launches, syncs and memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import (
    BF16,
    CASES,
    EVERY,
    ROWS,
    Case,
    all_params,
    assert_same_bits,
    bits,
    by_id,
    copy_grads,
    make,
    new_params,
    set_grads,
    snapshot,
)
from torch import Tensor
from torch.nn import Parameter

ADAM = CASES[0]
SAMPLE = by_id(EVERY, "adam-decay-amsgrad", "adam-remainder-fp8", "adam-fp16-master")


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def new_scaler(device: torch.device, scale: float = 2.0**12) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type, init_scale=scale)
    scaler.scale(torch.ones((), device=device))  # makes the scale's tensor
    return scaler


def skip_unless_checkable(case: Case, device: torch.device) -> None:
    """torch.amp.GradScaler of some versions cannot check bf16 gradients on CUDA."""
    for dtype in {param.dtype for param in new_params(case, device, [(1,)])}:
        flag, one = torch.zeros(1, device=device), torch.ones(1, device=device)
        grad = torch.ones(1, device=device, dtype=dtype)
        try:
            torch._amp_foreach_non_finite_check_and_unscale_([grad], flag, one)
        except NotImplementedError:
            pytest.skip(f"torch {torch.__version__} cannot check gradients of {dtype} on CUDA")


def scale_grads(params: list[Any], factor: float) -> None:
    for param in params:
        param.grad *= factor


def two_alike(
    case: Case, device: torch.device
) -> tuple[list[Parameter], Any, list[Parameter], Any]:
    params = new_params(case, device, [(300,), (5000,)])
    copies = [Parameter(param.detach().clone()) for param in params]
    return params, make(case, params), copies, make(case, copies)


Step = Callable[[torch.amp.GradScaler, Any], None]


def by_scaler(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    scaler.step(optimizer)


def by_argument(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """As TransformerEngine's users write it."""
    optimizer.step(grad_scaler=scaler)


STEPS = [by_scaler, by_argument]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_scaled_gradients(case: Case, step: Step, device: torch.device, backend: str) -> None:
    """A power of two is divided out exactly: the bits of a run without a scaler."""
    skip_unless_checkable(case, device)
    params, optimizer, copies, twin = two_alike(case, device)
    scaler = new_scaler(device)
    for _ in range(3):
        set_grads(params)
        copy_grads(params, copies)
        scale_grads(params, 2.0**12)
        step(scaler, optimizer)
        scaler.update()
        twin.step()
    assert optimizer.backend == backend
    assert_same_bits(snapshot(optimizer), snapshot(twin))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_scaler_step_only_reads_gradients(case: Case, device: torch.device, backend: str) -> None:
    skip_unless_checkable(case, device)
    params, optimizer, _, _ = two_alike(case, device)
    set_grads(params)
    before = [bits(param.grad).clone() for param in params if param.grad is not None]
    new_scaler(device).step(optimizer)
    assert optimizer.backend == backend
    assert_same_bits([bits(param.grad) for param in params if param.grad is not None], before)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_a_skipped_step_changes_no_bit(
    case: Case, steps_before: int, value: float, device: torch.device, backend: str
) -> None:
    skip_unless_checkable(case, device)
    check_skipped_step(case, by_scaler, steps_before, value, device, backend)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_skipped_step_by_argument(
    case: Case, steps_before: int, device: torch.device, backend: str
) -> None:
    skip_unless_checkable(case, device)
    check_skipped_step(case, by_argument, steps_before, float("inf"), device, backend)


def check_skipped_step(
    case: Case, step: Step, steps_before: int, value: float, device: torch.device, backend: str
) -> None:
    """As the first step and later; the step after it is what it would have been."""
    params, optimizer, copies, twin = two_alike(case, device)
    optimizer.init_state()
    twin.init_state()
    scaler = new_scaler(device)

    def both_step() -> None:
        set_grads(params)
        copy_grads(params, copies)
        scale_grads(params, scaler.get_scale())
        step(scaler, optimizer)
        scaler.update()
        twin.step()

    for _ in range(steps_before):
        both_step()
    before = snapshot(optimizer)
    set_grads(params)
    assert params[1].grad is not None
    params[1].grad[4321] = value
    step(scaler, optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert_same_bits(snapshot(optimizer), before)
    both_step()
    assert optimizer.backend == backend
    assert_same_bits(snapshot(optimizer), snapshot(twin))
    assert optimizer.state[params[0]]["step"] == steps_before + 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_unscale_then_clip(case: Case, step: Step, device: torch.device, backend: str) -> None:
    skip_unless_checkable(case, device)
    params, optimizer, copies, twin = two_alike(case, device)
    scaler = new_scaler(device)
    for _ in range(2):
        set_grads(params)
        copy_grads(params, copies)
        scale_grads(params, 2.0**12)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        step(scaler, optimizer)
        scaler.update()
        torch.nn.utils.clip_grad_norm_(copies, 0.5)
        twin.step()
    assert optimizer.backend == backend
    assert_same_bits(snapshot(optimizer), snapshot(twin))


def test_autocast_training_runs_without_a_warning(device: torch.device, backend: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model.to(device)
    optimizer = make(ADAM, model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8)
    inputs = torch.randn(64, 8).to(device)
    losses = []
    for _ in range(30):
        with torch.autocast(device.type, dtype=BF16):
            loss = (model(inputs).float() - inputs.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert optimizer.backend == backend
    assert losses[-1] < 0.8 * losses[0]


# ---- CUDA graphs --------------------------------------------------------------------------------


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        function()
    return graph


def refill(params: list[Any]) -> None:
    """New gradients where the captured step looks for them."""
    for param in params:
        param.grad.copy_(torch.randn(param.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("ready", ["eager step", "init_state"])
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_replays_are_steps(case: Case, capturable: bool, ready: str, cuda: torch.device) -> None:
    """Bit for bit, with an eager step in between."""
    params = new_params(case, cuda, [(300,), (5000,), (64, 129)])
    copies = [Parameter(param.detach().clone()) for param in params]
    groups = [dict(params=params[:1]), dict(params=params[1:], lr=0.02)]
    optimizer = make(case, groups, capturable=capturable)
    groups = [dict(params=copies[:1]), dict(params=copies[1:], lr=0.02)]
    twin = make(case, groups, capturable=capturable)
    set_grads(params)
    for param, other in zip(params, copies, strict=True):
        other.grad = param.grad
    if ready == "init_state":
        optimizer.init_state()
        twin.init_state()
    else:
        optimizer.step()
        twin.step()
    before = snapshot(optimizer)
    graph = captured(optimizer.step)
    assert_same_bits(snapshot(optimizer), before)
    for i in range(4):
        refill(params)
        if i == 2:
            optimizer.step()
        else:
            graph.replay()
        twin.step()
        assert_same_bits(snapshot(optimizer), snapshot(twin))
    assert optimizer.backend == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["fill_", "float"])
def test_replays_follow_the_lr(how: str, cuda: torch.device) -> None:
    """With gradients of 1 a step moves by lr. A float put into the group counts when eager."""
    (param,) = new_params(ADAM, cuda, [(5000,)])
    optimizer = make(ADAM, [param], lr=torch.tensor(0.1), capturable=True)
    param.grad = torch.ones_like(param)
    optimizer.init_state()
    graph = captured(optimizer.step)
    for step, lr in enumerate([0.1, 0.01, 0.0], start=1):
        before = param.detach().clone()
        if how == "fill_":
            optimizer.param_groups[0]["lr"].fill_(lr)
            graph.replay()
        else:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        torch.testing.assert_close(before - param, torch.full_like(param, lr), rtol=0, atol=1e-6)
        assert optimizer.state[param]["step"] == step
        if lr == 0:
            assert torch.equal(before, param.detach())


@pytest.mark.gpu
def test_two_graphs_and_a_later_group(cuda: torch.device) -> None:
    params = new_params(ADAM, cuda, [(300,), (5000,), (77,)])
    copies = [Parameter(param.detach().clone()) for param in params]
    optimizer = make(ADAM, params[:2], lr=0.01, capturable=True)
    twin = make(ADAM, copies[:2], lr=0.01, capturable=True)
    optimizer.init_state()
    grads = [[torch.randn_like(param) for param in params[:2]] for _ in range(2)]
    graphs = []
    for own in grads:
        for param, grad in zip(params[:2], own, strict=True):
            param.grad = grad
        graphs.append(captured(optimizer.step))

    def replay(i: int) -> None:
        graphs[i].replay()
        for other, grad in zip(copies, grads[i], strict=False):
            other.grad = grad
        copies[2].grad = None
        twin.step()

    for i in (0, 1, 1, 0):
        replay(i)
    assert_same_bits(snapshot(optimizer), snapshot(twin))
    optimizer.add_param_group(dict(params=params[2:], lr=0.5))
    twin.add_param_group(dict(params=copies[2:], lr=0.5))
    replay(0)
    for param, other in zip(params, copies, strict=True):
        param.grad = other.grad = torch.randn_like(param)
    optimizer.step()
    twin.step()
    replay(1)
    assert_same_bits(snapshot(optimizer), snapshot(twin))
    assert optimizer.state[params[2]]["step"] == 1


@pytest.mark.gpu
def test_capture_without_state_is_an_error(cuda: torch.device) -> None:
    params = new_params(ADAM, cuda, [(5000,)])
    optimizer = make(ADAM, params, capturable=True)
    set_grads(params)
    before = snapshot(optimizer)
    spare = torch.zeros(1, device=cuda)

    def try_to_step() -> None:
        with pytest.raises(RuntimeError, match=r"one eager step or call init_state\(\)"):
            optimizer.step()
        spare.add_(1)  # torch warns of empty graphs

    captured(try_to_step)
    assert not optimizer.state
    assert_same_bits(snapshot(optimizer), before)
    optimizer.step()
    captured(optimizer.step).replay()
    assert optimizer.state[params[0]]["step"] == 2


@pytest.mark.gpu
def test_a_scaler_step_is_captured(cuda: torch.device) -> None:
    """found_inf and the scale are read on the device at each replay."""
    params = new_params(ADAM, cuda, [(300,), (5000,)])
    copies = [Parameter(param.detach().clone()) for param in params]
    optimizer, twin = (make(ADAM, ps, capturable=True) for ps in (params, copies))
    set_grads(params)
    optimizer.init_state()
    scale, found_inf = torch.ones(1, device=cuda), torch.zeros(1, device=cuda)
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    graph = captured(optimizer.step)
    del optimizer.grad_scale, optimizer.found_inf
    for factor, skipped in [(1.0, 0.0), (8.0, 0.0), (8.0, 1.0), (2.0, 0.0)]:
        refill(params)
        copy_grads(params, copies)
        scale_grads(params, factor)
        scale.fill_(factor)
        found_inf.fill_(skipped)
        graph.replay()
        if not skipped:
            twin.step()
    assert_same_bits(snapshot(optimizer), snapshot(twin))


# ---- what a step costs --------------------------------------------------------------------------


def ready_optimizer(case: Case, count: int, group_count: int, **options: Any) -> Any:
    """One signature: no tensor is small enough for another."""
    params = new_params(case, torch.device("cuda"), [(4096 + i % 3,) for i in range(count)])
    groups = [dict(params=params[i::group_count], lr=1e-3 * i) for i in range(group_count)]
    optimizer = make(case, groups, **options)
    set_grads(params)
    optimizer.step()
    optimizer.step()
    torch.cuda.synchronize()
    return optimizer


def launches_of(step: Callable[[], Any]) -> list[str]:
    """The kernels that a step launches."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=activities) as profile:
            step()
            torch.cuda.synchronize()
    events: Any = profile.events()
    names = [event.name for event in events if event.device_type.name == "CUDA"]
    return [name for name in names if not name.startswith("Optimizer.")]  # no annotations


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "group_count"), [(1, 1), (300, 16), (5000, 7)])
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_two_launches(case: Case, count: int, group_count: int, cuda: torch.device) -> None:
    optimizer = ready_optimizer(case, count, group_count)
    kernels = launches_of(optimizer.step)
    assert len(kernels) == 2, kernels
    assert ["advance" in name for name in kernels] == [True, False]
    optimizer.zero_grad()
    assert launches_of(optimizer.step) == []


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_no_sync_and_no_allocation(case: Case, capturable: bool, cuda: torch.device) -> None:
    optimizer = ready_optimizer(case, 20, 3, capturable=capturable)
    optimizer.grad_scale = torch.ones(1, device=cuda)
    optimizer.found_inf = torch.zeros(1, device=cuda)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the debug mode calls itself a prototype
            torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
def test_the_current_stream_is_used(cuda: torch.device) -> None:
    """A step on a side stream waits for what that stream does before it."""
    params = new_params(ADAM, cuda, [(5000,)])
    optimizer = make(ADAM, params, lr=0.1)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.init_state()
    before = params[0].detach().clone()
    torch.cuda.synchronize()
    cuda_module: Any = torch.cuda  # parts of it are untyped
    side = cuda_module.Stream()
    with torch.cuda.stream(side):
        cuda_module._sleep(100_000_000)
        params[0].grad.fill_(1)
        optimizer.step()
    torch.cuda.synchronize()
    torch.testing.assert_close(before - params[0], torch.full_like(before, 0.1))


@pytest.mark.gpu
def test_another_current_device_and_two_devices(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    devices = ("cuda:1", "cuda:0", "cuda:1")
    for count in (1, 3):
        for options in ({}, dict(capturable=True), dict(max_grad_norm=1.0)):
            values = [torch.randn(5000) for _ in range(count)]
            params = [Parameter(v.to(d)) for v, d in zip(values, devices, strict=False)]
            copies = [Parameter(value.clone()) for value in values]
            optimizer, twin = make(ADAM, params, **options), make(ADAM, copies, **options)
            for _ in range(3):
                set_grads(copies)
                for param, copied in zip(params, copies, strict=True):
                    assert copied.grad is not None
                    param.grad = copied.grad.to(param.device)
                optimizer.step()
                twin.step()
                assert torch.cuda.current_device() == 0
            for param, copied in zip(params, copies, strict=True):
                torch.testing.assert_close(param.detach().cpu(), copied.detach())
            assert optimizer.backend == "cuda"


def test_a_copied_optimizer_owns_its_plans(device: torch.device, backend: str) -> None:
    """A deepcopy after steps does not write into the first one's tensors."""
    params = new_params(ADAM, device, [(5000,)])
    optimizer = make(ADAM, params)
    set_grads(params)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    before = snapshot(twin)
    optimizer.step()
    assert optimizer.backend == backend
    assert_same_bits(snapshot(twin), before)
    others: list[Tensor] = all_params(twin)
    for param, other in zip(params, others, strict=True):
        other.grad = param.grad
    twin.step()
    assert_same_bits(snapshot(twin), snapshot(optimizer))
