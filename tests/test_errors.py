"""Input that cannot be honoured: one clear error each, and nothing changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import (
    CASES,
    all_params,
    assert_same_bits,
    by_id,
    checked_step,
    make,
    new_params,
    set_grads,
    snapshot,
)
from torch import Tensor
from torch.nn import Parameter

import fusedopt

ADAM = CASES[0]
(SGD,) = by_id(CASES, "sgd-default")

# Options, and what the message says: the value and what is allowed.
INVALID_OPTIONS: list[tuple[dict[str, Any], str]] = [
    (dict(lr=-1.0), r"lr must be finite and at least 0, got -1\.0"),
    (dict(lr=float("nan")), r"lr must be finite .* got nan"),
    (dict(lr=float("inf")), r"lr must be finite .* got inf"),
    (dict(lr=torch.tensor(-0.5)), r"lr must be finite .* got .*-0\.5"),
    (dict(lr=torch.ones(2)), r"lr must be one number, got tensor"),
    (dict(eps=-1e-8), r"eps must be finite and at least 0, got -1e-08"),
    (dict(eps=float("nan")), r"eps must be .* got nan"),
    (dict(lr="1e-3"), r"lr must be one number, got '1e-3'"),
    (dict(lr=None), r"lr must be one number, got None"),
    (dict(weight_decay=1j), r"weight_decay must be one number, got 1j"),
    (dict(eps=torch.ones(2)), r"eps must be one number, got tensor"),
    (dict(betas=(1.0, 0.9)), r"betas must lie in \[0, 1\), got \(1\.0, 0\.9\)"),
    (dict(betas=(0.9, 1.0)), r"betas must lie in \[0, 1\), got \(0\.9, 1\.0\)"),
    (dict(betas=(-0.1, 0.9)), r"betas must lie in \[0, 1\), got \(-0\.1, 0\.9\)"),
    (dict(betas=(0.9, float("nan"))), r"betas must lie in \[0, 1\), got .*nan"),
    (dict(betas=(0.9,)), r"betas must be two numbers, got \(0\.9,\)"),
    (dict(betas=0.9), r"betas must be two numbers, got 0\.9"),
    (dict(betas=(0.9, torch.ones(2))), r"betas\[1\] must be one number, got tensor"),
    (dict(weight_decay=-0.1), r"weight_decay must be finite and at least 0, got -0\.1"),
    (dict(exp_avg_dtype="fp7"), r"exp_avg_dtype must be .*'fp32', 'bf16', 'fp16'.* got 'fp7'"),
    (dict(exp_avg_sq_dtype="fp7"), r"exp_avg_sq_dtype must be .*'fp8'.* got 'fp7'"),
    (dict(exp_avg_dtype=torch.int32), r"exp_avg_dtype must be .* got torch\.int32"),
    (dict(exp_avg_dtype=[8]), r"exp_avg_dtype must be .* got \[8\]"),
    (dict(master_weight_dtype=torch.bfloat16), r"master_weight_dtype must .* got torch\.bfloat16"),
    (dict(master_weight_dtype="fp7"), r"master_weight_dtype must .*'fp32', 'fp16', .* got 'fp7'"),
    (dict(master_weight_dtype="bf16"), r"master_weight_dtype must .* got 'bf16'"),
    (dict(maximize=torch.ones(2)), r"maximize must be True or False, got tensor"),
    (dict(master_weight_bits=16), r"master_weight_bits must be None or 24, got 16"),
    (
        dict(master_weight_bits=24, store_param_remainders=True),
        r"store_param_remainders=True .* master_weight_bits=24",
    ),
    (dict(foreach=True), r"foreach=True cannot be honoured"),
    (dict(fused=False), r"fused=False cannot be honoured: leave it at None or True"),
    (dict(differentiable=True), r"differentiable=True cannot be honoured"),
]
INVALID_SGD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    (dict(lr=-1.0), r"lr must be finite and at least 0, got -1\.0"),
    (dict(momentum=-0.1), r"momentum must .* got -0\.1"),
    (dict(momentum=0.9, dampening=float("nan")), r"dampening must .* got nan"),
    (dict(weight_decay=-0.1), r"weight_decay must be finite and at least 0, got -0\.1"),
    (dict(nesterov=True), r"nesterov"),
    (dict(nesterov=True, momentum=0.9, dampening=0.5), r"nesterov.*dampening"),
    (dict(momentum=0.9, momentum_dtype="fp7"), r"momentum_dtype must be .*'fp8'.* got 'fp7'"),
]
INVALID_SEEDS = [-1, 2**32, 1.5, "x"]


def option_id(row: Any) -> str:
    return ",".join(f"{key}={value}" for key, value in row.items()) if isinstance(row, dict) else ""


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS, ids=option_id)
def test_the_constructor_rejects(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(ADAM, [Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(("options", "message"), INVALID_SGD_OPTIONS, ids=option_id)
def test_the_constructor_of_sgd_rejects(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(SGD, [Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("seed", INVALID_SEEDS)
def test_the_constructor_rejects_the_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=rf"seed must .* got {re.escape(repr(seed))}"):
        make(ADAM, [Parameter(torch.ones(3))], seed=seed)


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS, ids=option_id)
def test_a_bad_group_is_not_added(
    options: dict[str, Any], message: str, device: torch.device, backend: str
) -> None:
    params = new_params(ADAM, device, [(3,), (4,)])
    optimizer = make(ADAM, params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(dict(params=params[1:], **options))
    assert [group["params"] for group in optimizer.param_groups] == [params[:1]]
    optimizer.add_param_group(dict(params=params[1:]))
    set_grads(params)
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


INVALID_PARAMS: dict[str, tuple[Any, str]] = {
    "float64": (torch.ones(3, dtype=torch.float64), r"torch\.float64"),
    "int32": (torch.ones(3, dtype=torch.int32), r"torch\.int32"),
    "complex": (torch.ones(3, dtype=torch.complex64), r"torch\.complex64"),
    "strided": (torch.ones(8)[::2], r"strides \(2,\)"),
    "narrowed": (torch.ones(4, 4)[:, :2], r"strides \(4, 1\)"),
    "expanded": (torch.ones(3, 1).expand(3, 4), r"strides \(1, 0\)"),
    "overlapping": (torch.ones(10).as_strided((4, 4), (2, 1)), r"strides \(2, 1\)"),
    "sparse": (torch.eye(3).to_sparse(), r"torch\.sparse_coo"),
}


def bad_param(kind: str, device: torch.device) -> tuple[Parameter, str]:
    value, message = INVALID_PARAMS[kind]
    if kind not in ("expanded", "overlapping", "strided", "narrowed"):
        value = value.to(device)
    floating = value.is_floating_point() or value.is_complex()
    return Parameter(value, requires_grad=floating), message


@pytest.mark.parametrize("kind", INVALID_PARAMS)
def test_bad_parameters(kind: str, device: torch.device, backend: str) -> None:
    bad, message = bad_param(kind, device)
    good = new_params(ADAM, device, [(3,), (4,)])
    with pytest.raises(TypeError, match=rf"(?s)parameter 1 of group 0.*{message}"):
        make(ADAM, [good[0], bad])
    optimizer = make(ADAM, good[:1])
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=rf"(?s)parameter 1 of group 1.*{message}"):
        optimizer.add_param_group(dict(params=[good[1], bad]))
    assert [group["params"] for group in optimizer.param_groups] == [good[:1]]
    assert_same_bits(snapshot(optimizer), before)
    set_grads(good)
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


@pytest.mark.parametrize("kind", ["float64", "strided"])
def test_parameters_that_went_bad(kind: str, device: torch.device, backend: str) -> None:
    """What the constructor accepted may have been replaced since."""
    params = new_params(ADAM, device, [(3,), (4,)])
    optimizer = make(ADAM, params)
    if kind == "float64":
        params[1].data = torch.ones(4, dtype=torch.float64, device=device)
    else:
        params[1].data = torch.ones(8, device=device)[::2]
    for param in params:
        param.grad = torch.ones_like(param)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match="parameter 1 of group 0"):
        optimizer.step()
    assert not optimizer.state
    assert_same_bits(snapshot(optimizer), before)
    params[1].grad = None
    params[1].data = torch.ones(4, device=device)
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


def sparse_grad(param: Tensor) -> Tensor:
    return torch.eye(4, device=param.device).to_sparse()


def float64_grad(param: Tensor) -> Tensor:
    return torch.ones(4, 4, dtype=torch.float64, device=param.device)


def short_grad(param: Tensor) -> Tensor:
    return torch.ones(4, 3, device=param.device)


INVALID_GRADS = [
    (sparse_grad, RuntimeError, r"sparse"),
    (float64_grad, TypeError, r"torch\.float64"),
    (short_grad, RuntimeError, r"\(4, 4\).*\(4, 3\)"),
]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("make_grad", "error", "message"), INVALID_GRADS)
def test_bad_gradients(
    make_grad: Any,
    error: type[Exception],
    message: str,
    steps_before: int,
    device: torch.device,
    backend: str,
) -> None:
    """The step is refused as a whole: groups before the bad one are unchanged too."""
    params = new_params(ADAM, device, [(5000,), (3,), (4, 4)])
    optimizer = make(
        ADAM, [dict(params=params[:1]), dict(params=params[1:])], use_decoupled_grad=True
    )

    def set_decoupled(last: Tensor) -> None:
        for param in params[:2]:
            setattr(param, "decoupled_grad", torch.randn(param.shape).to(device))  # noqa: B010
        setattr(params[2], "decoupled_grad", last)  # noqa: B010

    for _ in range(steps_before):
        set_decoupled(torch.randn(4, 4).to(device))
        checked_step(ADAM, optimizer)
    before = snapshot(optimizer)
    set_decoupled(make_grad(params[2]))
    with pytest.raises(error, match=rf"(?s)parameter 1 of group 1.*{message}"):
        optimizer.step()
    assert bool(optimizer.state) == bool(steps_before)
    assert_same_bits(snapshot(optimizer), before)
    set_decoupled(torch.randn(4, 4).to(device))
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


def test_sparse_gradients_of_an_embedding(device: torch.device, backend: str) -> None:
    table = torch.nn.Embedding(10, 4, sparse=True, device=device)
    other = Parameter(torch.ones(3, device=device))
    optimizer = make(ADAM, [other, table.weight])
    (table(torch.tensor([1, 2], device=device)).sum() + other.sum()).backward()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="parameter 1 of group 0"):
        optimizer.step()
    assert not optimizer.state
    assert_same_bits(snapshot(optimizer), before)
    table.weight.grad = None
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(lr=10**400), "lr must be one number"),
        (dict(seed=True), "seed must be an integer"),
        (dict(master_weight_bits=24.0), "master_weight_bits must be None or 24, got 24.0"),
    ],
    ids=str,
)
def test_values_of_another_kind(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fusedopt.FusedAdam([Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("name", ["max_grad_norm", "seed"])
def test_what_is_one_for_all_groups(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is one for the whole optimizer"):
        fusedopt.FusedSGD([{"params": [Parameter(torch.ones(3))], name: 1}])


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        make(ADAM, [])


def test_one_parameter_in_two_groups() -> None:
    (param,) = new_params(ADAM, torch.device("cpu"), [(3,)])
    optimizer = make(ADAM, [param])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group(dict(params=[param]))
    assert all_params(optimizer) == [param]


def test_an_unknown_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPT_BACKEND", "tpu")
    params = new_params(ADAM, torch.device("cpu"), [(3,)])
    optimizer = make(ADAM, params)
    set_grads(params)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="FUSEDOPT_BACKEND must be cuda, cpu or torch, got 'tpu'"):
        optimizer.step()
    assert not optimizer.state
    assert_same_bits(snapshot(optimizer), before)


def test_a_backend_that_cannot_update_these_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPT_BACKEND", "cuda")
    params = new_params(ADAM, torch.device("cpu"), [(3,)])
    optimizer = make(ADAM, params)
    set_grads(params)
    with pytest.raises(RuntimeError, match=r"FUSEDOPT_BACKEND=cuda cannot update .*cpu"):
        optimizer.step()
    assert not optimizer.state
