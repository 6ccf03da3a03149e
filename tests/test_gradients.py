"""The gradient's side of a step: the norm and clip inside step(), and steps inside backward()."""

import copy
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import copy_grads
from torch import Tensor
from torch.nn import Parameter

import fusedopt

SHAPES = [(70, 90), (5,), (0,), (20001,), (33000,)]
OPTIMIZERS = [
    (fusedopt.FusedAdam, dict(lr=0.01)),
    (fusedopt.FusedSGD, dict(lr=0.01, momentum=0.9)),
    (fusedopt.FusedLion, dict(lr=0.01)),
]


def new_params(device: torch.device, *dtypes: torch.dtype) -> list[Parameter]:
    return [
        Parameter(torch.randn(shape, device=device).to(dtypes[i % len(dtypes)]))
        for i, shape in enumerate(SHAPES)
    ]


def set_grads(params: list[Parameter], scale: float) -> None:
    for param in params:
        param.grad = torch.randn_like(param) * scale


def norm_of(params: list[Parameter]) -> Tensor:
    grads = [param.grad for param in params if param.grad is not None]
    return torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()


@pytest.mark.parametrize("scale", [1.0, 1e-4])  # clipped and not
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_clipping_is_torchs(
    kind: Any, options: Any, scale: float, device: torch.device, backend: str
) -> None:
    """Equal to clipping first and stepping then; gradients keep their bits."""
    params = new_params(device, torch.float32)
    copies = copy.deepcopy(params)
    optimizer, twin = kind(params, max_grad_norm=1.5, **options), kind(copies, **options)
    for _ in range(3):
        set_grads(params, scale)
        copy_grads(params, copies)
        before = [param.grad.clone() for param in params if param.grad is not None]
        optimizer.step()
        wanted = torch.nn.utils.clip_grad_norm_(copies, 1.5)
        twin.step()
        torch.testing.assert_close(optimizer.grad_norm, wanted, rtol=2e-6, atol=0)
        grads = [param.grad for param in params if param.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    assert optimizer.backend == backend
    if kind is not fusedopt.FusedLion:  # the sign of a sum near 0 may differ
        for param, other in zip(params, copies, strict=True):
            torch.testing.assert_close(param, other, rtol=2e-6, atol=2e-6)


def test_the_norm_is_of_all_dtypes_and_groups(device: torch.device, backend: str) -> None:
    params = new_params(device, torch.float32, torch.bfloat16, torch.float16)
    groups: list[dict[str, Any]] = [dict(params=params[:2]), dict(params=params[2:], lr=0.1)]
    optimizer = fusedopt.FusedAdam(groups, max_grad_norm=1.0)
    set_grads(params, 1.0)
    params[1].grad = None
    optimizer.step()
    assert optimizer.backend == backend
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm.double(), norm_of(params), rtol=1e-6, atol=0)
    first = optimizer.grad_norm.clone()
    optimizer.step()
    assert torch.equal(optimizer.grad_norm, first)  # the same bits every time


def test_the_norm_is_of_unscaled_gradients(device: torch.device, backend: str) -> None:
    params = new_params(device, torch.float32)
    copies = copy.deepcopy(params)
    optimizer = fusedopt.FusedAdam(params, lr=0.01, max_grad_norm=1.0)
    twin = fusedopt.FusedAdam(copies, lr=0.01, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    scaler.scale(torch.ones((), device=device))
    set_grads(copies, 1.0)
    for param, other in zip(params, copies, strict=True):
        param.grad = other.grad * 1024 if other.grad is not None else None
    scaler.step(optimizer)
    twin.step()
    assert torch.equal(optimizer.grad_norm, twin.grad_norm)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


def test_a_skipped_step_can_be_told(device: torch.device, backend: str) -> None:
    params = new_params(device, torch.float32)
    optimizer = fusedopt.FusedAdam(params)
    told = optimizer.last_step_skipped
    assert not told
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    for value in (1.0, float("nan"), 1.0):
        set_grads(params, value)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_step_skipped is told
        assert bool(told) == (value != value)


def test_the_norm_of_a_skipped_step(device: torch.device, backend: str) -> None:
    """It is that of the gradients, although they were not used."""
    params = new_params(device, torch.float32)
    optimizer = fusedopt.FusedAdam(params, max_grad_norm=1.0)
    for value in (1.0, float("inf"), 2.0):
        set_grads(params, 1.0)
        params[0].grad = torch.full_like(params[0], value)
        scaler: Any = optimizer  # which sets these two
        scaler.grad_scale = torch.full((), 4.0, device=device)
        scaler.found_inf = torch.full((), float(value == float("inf")), device=device)
        optimizer.step()
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm.double(), norm_of(params) / 4)
    assert optimizer.state[params[0]]["step"] == 2


def test_an_unscaled_gradient_that_is_not_finite(device: torch.device, backend: str) -> None:
    """unscale_, clip, step: nothing changes, and the scale halves."""
    params = new_params(device, torch.float32)
    optimizer = fusedopt.FusedAdam(params)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    for value, scale in ((1.0, 8.0), (float("inf"), 4.0)):
        before = [param.detach().clone() for param in params]
        scaler.scale(torch.ones((), device=device))
        set_grads(params, 1.0)
        params[0].grad = torch.full_like(params[0], value)
        scaler.unscale_(optimizer)
        fusedopt.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        same = [torch.equal(a, b) for a, b in zip(params, before, strict=True) if a.numel()]
        assert set(same) == {value == float("inf")}
    assert optimizer.state[params[0]]["step"] == 1


def test_a_scaler_that_scaled_nothing(device: torch.device, backend: str) -> None:
    params = new_params(device, torch.float32)
    set_grads(params, 1.0)
    for limit in (None, 1.0):
        optimizer = fusedopt.FusedAdam(params, max_grad_norm=limit)
        with pytest.raises(RuntimeError, match="grad_scaler has scaled no loss yet"):
            optimizer.step(grad_scaler=torch.amp.GradScaler(device.type))


def test_what_is_not_finite_spreads_as_in_torch(device: torch.device, backend: str) -> None:
    params = new_params(device, torch.float32)
    optimizer = fusedopt.FusedSGD(params, lr=0.01, max_grad_norm=1.0)
    set_grads(params, 1.0)
    assert params[0].grad is not None
    params[0].grad[3, 4] = float("inf")
    before = params[3].detach().clone()
    optimizer.step()
    assert params[0].isnan().sum() == 1  # inf / inf; everything else is divided to 0
    assert torch.equal(params[3], before)


def scaler_of(device: torch.device, scale: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type, init_scale=scale)
    scaler.scale(torch.ones((), device=device))
    return scaler


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_the_norm_finds_what_is_not_finite(
    bad: float, device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """step(grad_scaler=...) with a norm needs no other look at the gradients."""

    def no_look(*_: Any) -> None:
        raise AssertionError("the gradients were read once more")

    params = new_params(device, torch.float32, torch.bfloat16, torch.float16)
    copies = copy.deepcopy(params)
    optimizer = fusedopt.FusedAdam(params, lr=0.01, max_grad_norm=1.0)
    twin = fusedopt.FusedAdam(copies, lr=0.01, max_grad_norm=1.0)
    scaler = scaler_of(device, 64.0)
    monkeypatch.setattr(scaler, "_check_inf_per_device", no_look)
    for value in (1.0, bad, 1.0):
        set_grads(params, float(scaler.get_scale()))
        if value != 1.0:
            assert params[-1].grad is not None
            params[-1].grad[-1] = value
        else:
            for param, other in zip(params, copies, strict=True):
                assert param.grad is not None
                other.grad = param.grad / scaler.get_scale()
            twin.step()
        scale = scaler.get_scale()
        optimizer.step(grad_scaler=scaler)
        scaler.update()
        assert scaler.get_scale() == (scale if value == 1.0 else scale / 2)
        assert bool(optimizer.last_step_skipped) == (value != 1.0)
    assert optimizer.backend == backend
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))
    for param in params:
        assert optimizer.state[param]["step"] == 2


def test_huge_gradients_are_finite(device: torch.device, backend: str) -> None:
    """Their squares have not the range of fp32."""
    params = new_params(device, torch.float32)
    optimizer = fusedopt.FusedSGD(params, lr=1.0, max_grad_norm=1.0)
    set_grads(params, 1e25)
    scaler = scaler_of(device, 1.0)
    before = params[0].detach().clone()
    optimizer.step(grad_scaler=scaler)
    scaler.update()
    assert not optimizer.last_step_skipped
    assert not torch.equal(params[0], before)
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm.double(), norm_of(params), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_norm_that_means_nothing(value: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm must be None, or finite and above 0, got"):
        fusedopt.FusedAdam([Parameter(torch.ones(3))], max_grad_norm=value)


def test_gradients_come_later(device: torch.device, backend: str) -> None:
    """A step without gradients, whose norm is 0, and then one with many."""
    params = [Parameter(torch.zeros(50_000, device=device)) for _ in range(3)]
    optimizer = fusedopt.FusedSGD(params, lr=1.0, max_grad_norm=1.0)
    optimizer.init_state()
    optimizer.step()
    for scale in (1.0, 0.0):
        for param in params:
            param.grad = torch.randn_like(param) if scale else None
        norm = norm_of(params) if scale else torch.zeros((), device=device).double()
        optimizer.step()
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)
    assert optimizer.backend == backend


def test_the_largest_number_is_finite(device: torch.device, backend: str) -> None:
    params = [Parameter(torch.zeros(n, device=device)) for n in (5000, 3)]
    optimizer = fusedopt.FusedSGD(params, lr=1.0, max_grad_norm=1.0)
    scaler = scaler_of(device, 1.0)
    for param in params:
        param.grad = torch.full_like(param, torch.finfo(torch.float32).max)
    optimizer.step(grad_scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 1
    assert not optimizer.last_step_skipped
    assert optimizer.backend == backend


@pytest.mark.gpu
def test_a_clipped_step_is_captured(cuda: torch.device) -> None:
    """Right after init_state(), and again after eager steps."""
    params = new_params(cuda, torch.float32, torch.bfloat16)
    copies = copy.deepcopy(params)
    set_grads(params, 1.0)
    optimizer, twin = (
        fusedopt.FusedAdam(p, lr=0.01, max_grad_norm=1.0, capturable=True) for p in (params, copies)
    )
    optimizer.init_state()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for eager in (False, False, True, False):
        for param in params:
            assert param.grad is not None
            param.grad.copy_(torch.randn_like(param))
        copy_grads(params, copies)
        if eager:
            optimizer.step()
        else:
            graph.replay()
        twin.step()
        assert torch.equal(optimizer.grad_norm, twin.grad_norm)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


# ---- clip_grad_norm_ -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 1.5, 1e9])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.bfloat16,), (torch.float16, torch.float32, torch.bfloat16)],
    ids=str,
)
def test_clip_grad_norm(
    dtypes: tuple[torch.dtype, ...], max_norm: float, device: torch.device, backend: str
) -> None:
    params = new_params(device, *dtypes)
    for scale in (1.0, 1e-3):
        set_grads(params, scale)
        params[1].grad = None
        norm = norm_of(params)
        factor = float((max_norm / (norm + 1e-6)).clamp(max=1))
        wanted = [None if p.grad is None else (p.grad.float() * factor).to(p.dtype) for p in params]
        got = fusedopt.clip_grad_norm_(params, max_norm)
        assert got.dim() == 0
        assert got.device == params[0].device
        # Without kernels it is torch's, which rounds norms to the gradients' dtype.
        rtol = 1e-6 if backend != "torch" or dtypes == (torch.float32,) else 1e-2
        torch.testing.assert_close(got.double(), norm, rtol=rtol, atol=0)
        for param, grad in zip(params, wanted, strict=True):
            if grad is None:
                assert param.grad is None
            else:
                kind = torch.finfo(grad.dtype)
                smallest = kind.tiny * kind.eps
                eps = max(rtol, kind.eps)
                torch.testing.assert_close(param.grad, grad, rtol=eps, atol=smallest)


def test_clip_grad_norm_of_any_layout(device: torch.device, native: str) -> None:
    """Dense in any order of dimensions, unaligned, or not dense at all."""
    wide = torch.randn(4, 8, 6, 6, device=device)
    grads = [
        wide.clone(memory_format=torch.channels_last),
        torch.randn(300, 20, device=device).t(),
        torch.randn(5001, device=device)[1:],
        torch.randn(8193, device=device, dtype=torch.bfloat16)[1:],
    ]
    strided = torch.randn(64, 64, device=device)[:, ::2]
    # One that is not dense leaves all to torch, which rounds norms to the gradients' dtype.
    for some, rtol in ((grads, 1e-6), ([*grads, strided], 1e-2)):
        params = [Parameter(torch.zeros_like(grad)) for grad in some]
        for param, grad in zip(params, some, strict=True):
            param.grad = grad
        before = [grad.clone() for grad in some]
        norm = norm_of(params)
        got = fusedopt.clip_grad_norm_(iter(params), 2.0)
        torch.testing.assert_close(got.double(), norm, rtol=rtol, atol=0)
        for param, grad in zip(params, before, strict=True):
            assert param.grad is not None
            eps = max(rtol, torch.finfo(grad.dtype).eps)
            torch.testing.assert_close(
                param.grad, (grad.float() * float(2 / norm)).to(grad.dtype), rtol=eps, atol=0
            )


def test_clip_grad_norm_as_torch_has_it(device: torch.device, backend: str) -> None:
    assert fusedopt.clip_grad_norm_([], 1.0) == 0
    param = Parameter(torch.zeros(3, device=device))
    assert fusedopt.clip_grad_norm_(param, 1.0) == 0
    empty = Parameter(torch.zeros(0, device=device))
    empty.grad = torch.zeros(0, device=device)
    assert fusedopt.clip_grad_norm_(empty, 1.0) == 0
    param.grad = torch.tensor([3.0, -4.0, 0.0], device=device)
    assert fusedopt.clip_grad_norm_(param, 1.0, norm_type=1.0) == 7
    assert fusedopt.clip_grad_norm_(param, 1.0, norm_type=float("inf")) < 1
    assert fusedopt.clip_grad_norm_(param, 1.0, norm_type="inf") < 1
    for max_norm in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be 0 or more, got"):
            fusedopt.clip_grad_norm_(param, max_norm)
    for value in (float("inf"), float("nan")):
        twin = Parameter(torch.zeros(3, device=device))
        for p in (param, twin):
            p.grad = torch.tensor([3.0, value, 0.0], device=device)
        with pytest.raises(RuntimeError, match="norm"):
            fusedopt.clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
        assert torch.equal(param.grad.nan_to_num(7), twin.grad.nan_to_num(7))  # type: ignore[union-attr]
        norms = [clip([p], 1.0) for p, clip in ((param, fusedopt.clip_grad_norm_), (twin, CLIP))]
        torch.testing.assert_close(*norms, equal_nan=True)
        torch.testing.assert_close(param.grad, twin.grad, equal_nan=True)


CLIP = torch.nn.utils.clip_grad_norm_


def test_clip_grad_norm_follows_its_gradients(device: torch.device, native: str) -> None:
    """Other tensors, other sizes, other counts: what was sent before is not used."""
    for shape in [(500,), (500,), (70, 80), (3,), (500,)]:
        for count in (1, 40):
            params = [Parameter(torch.zeros(shape, device=device)) for _ in range(count)]
            for param in params:
                param.grad = torch.randn_like(param)
            norm = norm_of(params)
            assert float(fusedopt.clip_grad_norm_(params, 1e-3)) == pytest.approx(float(norm))
            assert float(norm_of(params)) == pytest.approx(1e-3, rel=1e-4)


def test_clip_grad_norm_in_threads(device: torch.device, native: str) -> None:
    """Each clips its own gradients, of the same sizes."""

    def clip(scale: float) -> bool:
        right = True
        for _ in range(50):
            params = [Parameter(torch.zeros(3000, device=device)) for _ in range(4)]
            for param in params:
                param.grad = torch.full_like(param, scale)
            got = fusedopt.clip_grad_norm_(params, 1.0)
            right &= float(got) == pytest.approx(scale * 12000**0.5, rel=1e-5)
            right &= float(norm_of(params)) == pytest.approx(1.0, rel=1e-4)
        return right

    fusedopt.clip_grad_norm_([Parameter(torch.zeros(1, device=device))], 1.0)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(clip, [1.0, 2.0, 3.0, 4.0]))


def test_clip_grad_norm_tells_autograd(device: torch.device, native: str) -> None:
    param = Parameter(torch.ones(3, device=device))
    param.grad = torch.ones(3, device=device)
    before = param.grad._version
    fusedopt.clip_grad_norm_(param, 0.5)
    assert param.grad._version > before


SHARDED = """
import os, sys, torch, fusedopt
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
params, norm = [], 0.0
kinds = {(5, 3): Shard(0), (40, 6): Shard(1), (7,): Replicate(), (9,): None}
for shape, placement in kinds.items():
    grad = torch.randn(shape)
    norm += float(grad.double().square().sum())
    place = lambda t: t if placement is None else distribute_tensor(t, mesh, [placement])
    param = torch.nn.Parameter(place(torch.zeros(shape)))
    param.grad = place(grad.clone())
    params.append((param, grad))
got = fusedopt.clip_grad_norm_([param for param, _ in params], 1.0)
assert not isinstance(got, DTensor)
assert abs(float(got) - norm ** 0.5) < 1e-5, (float(got), norm ** 0.5)
for param, grad in params:
    whole = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
    torch.testing.assert_close(whole, grad / norm ** 0.5, rtol=1e-5, atol=1e-7)
dist.barrier()
os._exit(0)  # what was to be seen was seen; gloo's threads now and then end a process by abort()
"""


@pytest.mark.parametrize("world", [2, 4])
def test_clip_grad_norm_of_shards(world: int, tmp_path: Path) -> None:
    """Uneven and empty shards, replicas and plain tensors: one global norm."""
    environment = os.environ | {"PYTHONPATH": str(Path(fusedopt.__file__).parent)}
    command = [sys.executable, "-c", SHARDED]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 300, 5000])
def test_clip_grad_norm_is_two_launches(count: int, cuda: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    params = [Parameter(torch.zeros(900, device=cuda, dtype=dtypes[i % 3])) for i in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    fusedopt.clip_grad_norm_(params, 1.0)
    fusedopt.clip_grad_norm_(params, 0.5)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own, and the debug mode's
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            try:
                torch.cuda.set_sync_debug_mode("error")
                norm = fusedopt.clip_grad_norm_(params, 0.25)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    events: Any = profile.events()
    names = [event.name for event in events if event.device_type.name == "CUDA"]
    assert len(names) == 2, names
    assert float(norm) == pytest.approx(0.5, rel=1e-3)
    assert float(norm_of(params)) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.gpu
def test_clip_grad_norm_is_captured(cuda: torch.device) -> None:
    """And goes on to work when many other gradients have been clipped."""
    params = new_params(cuda, torch.float32, torch.bfloat16)
    set_grads(params, 1.0)
    fusedopt.clip_grad_norm_(params, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = fusedopt.clip_grad_norm_(params, 1.0)
    for i in range(40):
        other = Parameter(torch.zeros(100 + i, device=cuda))
        other.grad = torch.ones_like(other)
        fusedopt.clip_grad_norm_(other, 1.0)
    for _ in range(3):
        for param in params:
            assert param.grad is not None
            param.grad.copy_(torch.randn_like(param))
        wanted = norm_of(params)
        graph.replay()
        assert float(norm) == pytest.approx(float(wanted), rel=1e-5)
        assert float(norm_of(params)) == pytest.approx(1.0, rel=1e-2)


@pytest.mark.gpu
def test_clip_grad_norm_is_not_captured_unprepared(cuda: torch.device) -> None:
    param = Parameter(torch.zeros(777, device=cuda))
    param.grad = torch.ones_like(param)
    with (
        pytest.raises(RuntimeError, match="for the first time while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        fusedopt.clip_grad_norm_(param, 1.0)
    assert float(fusedopt.clip_grad_norm_(param, 1.0)) == pytest.approx(777**0.5)


# ---- steps inside backward() ---------------------------------------------------------------------


def new_model(device: torch.device) -> torch.nn.Module:
    layers = [torch.nn.Linear(80, 96), torch.nn.GELU(), torch.nn.Linear(96, 4)]
    return torch.nn.Sequential(*layers).to(device)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_steps_in_backward(kind: Any, options: Any, device: torch.device, backend: str) -> None:
    """The same bits as a step after backward(), and no gradient is left."""
    model = new_model(device)
    twin = copy.deepcopy(model)
    optimizer, after = kind(model.parameters(), **options), kind(twin.parameters(), **options)
    handle = fusedopt.step_in_backward(model, optimizer)
    for i in range(3):
        x = torch.randn(16, 80, device=device)
        for group in (*optimizer.param_groups, *after.param_groups):
            group["lr"] = 0.01 / (1 + i)
        model(x).square().mean().backward()
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())
        twin(x).square().mean().backward()
        after.step()
        after.zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    handle.remove()
    assert optimizer.backend == backend
    model(x).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    assert optimizer.backend == backend


def test_a_state_replaced_between_steps_in_backward(device: torch.device, backend: str) -> None:
    model = torch.nn.Linear(3, 1, bias=False, device=device)
    model.weight.data.zero_()
    optimizer = fusedopt.FusedSGD(model.parameters(), lr=1.0, momentum=1.0)
    fusedopt.step_in_backward(model, optimizer)
    model(torch.ones(3, device=device)).backward()
    buffer = torch.full((1, 3), 5.0, device=device)
    optimizer.state[model.weight]["momentum_buffer"] = buffer
    model(torch.ones(3, device=device)).backward()  # -1, then -(5 + 1)
    assert torch.equal(model.weight, torch.full((1, 3), -7.0, device=device))
    assert torch.equal(buffer, torch.full((1, 3), 6.0, device=device))
    optimizer.state.clear()
    model(torch.ones(3, device=device)).backward()
    assert torch.equal(model.weight, torch.full((1, 3), -8.0, device=device))
    assert optimizer.backend == backend


def test_parameters_that_came_after_the_hooks(device: torch.device, backend: str) -> None:
    """Unfrozen or added later: step() steps them."""
    model = torch.nn.Linear(3, 1, device=device)
    model.bias.requires_grad_(False)
    for param in model.parameters():
        param.data.zero_()
    optimizer = fusedopt.FusedSGD(model.parameters(), lr=1.0)
    fusedopt.step_in_backward(model, optimizer)
    model.bias.requires_grad_(True)
    late = Parameter(torch.zeros(1, device=device))
    optimizer.add_param_group(dict(params=[late]))
    for i in range(2):
        (model(torch.ones(3, device=device)) + late).backward()
        optimizer.step()
        for param in (*model.parameters(), late):
            assert torch.equal(param, torch.full_like(param, -1.0 - i))
            assert param.grad is None
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 needs every gradient"):
        optimizer.max_grad_norm = 1.0


def test_what_is_no_optimizer_or_scaler() -> None:
    model = torch.nn.Linear(3, 1)
    with pytest.raises(
        TypeError, match="optimizer must be a FusedAdam, FusedSGD or FusedLion, got SGD"
    ):
        fusedopt.step_in_backward(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="grad_scaler must be a GradScaler, got int"):
        fusedopt.FusedSGD(model.parameters()).step(grad_scaler=3)
    with pytest.raises(TypeError, match="only what fp8_parameter"):
        fusedopt.fp8_dequantize(torch.zeros(3))


@pytest.mark.parametrize("none", [None, True, False])
def test_zero_grad(none: bool | None, device: torch.device) -> None:
    """As set_grad_none of the constructor says, or set_to_none of the call."""
    params = [Parameter(torch.zeros(4, device=device)) for _ in range(2)]
    groups: list[dict[str, Any]] = [
        dict(params=params[:1]),
        dict(params=params[1:], use_decoupled_grad=True),
    ]
    optimizer = fusedopt.FusedAdam(groups, set_grad_none=none)
    for override in (None, True, False):
        params[0].grad = torch.ones_like(params[0])
        params[1].decoupled_grad = torch.ones_like(params[1])  # type: ignore[attr-defined]
        optimizer.zero_grad(*([] if override is None else [override]))
        dropped = override if override is not None else none is not False
        for found in (params[0].grad, params[1].decoupled_grad):  # type: ignore[attr-defined]
            assert found is None if dropped else torch.equal(found, torch.zeros(4, device=device))


def test_what_cannot_step_in_backward() -> None:
    model = new_model(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 needs every gradient"):
        fusedopt.step_in_backward(model, fusedopt.FusedAdam(model.parameters(), max_grad_norm=1.0))
    with pytest.raises(ValueError, match=r"0\.weight is not in the optimizer"):
        fusedopt.step_in_backward(model, fusedopt.FusedAdam(model[2].parameters()))  # type: ignore[index]
    optimizer = fusedopt.FusedAdam(model.parameters())
    fusedopt.step_in_backward(model, optimizer)
    with pytest.raises(ValueError, match="is on for this optimizer already"):
        fusedopt.step_in_backward(model, optimizer)
    x = torch.randn(3, 80)
    model(x).sum().backward()
    optimizer.step()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="cannot accumulate gradients"):
        model(x).sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="cannot be combined with a GradScaler"):
        scaler.step(optimizer)
