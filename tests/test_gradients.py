"""The gradient's side of a step: the norm and clip inside step(), and steps inside backward()."""

import copy
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


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_norm_that_means_nothing(value: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm must be None, or finite and above 0, got"):
        fusedopt.FusedAdam([Parameter(torch.ones(3))], max_grad_norm=value)


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
    model(x).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    assert optimizer.backend == backend


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
