"""Every row of the table against its reference: parameters and states, on every path."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any

import pytest
import torch
from cases import (
    BF16,
    CASES,
    EVERY,
    F16,
    F32,
    LARGE_SIZES,
    NARROW,
    ROWS,
    SIZES,
    Case,
    States,
    all_params,
    assert_same_bits,
    bits,
    by_id,
    checked_step,
    flat,
    in_ulps,
    make,
    new_params,
    set_grads,
    snapshot,
)
from torch import Tensor
from torch.nn import Parameter

import fusedopt

SHAPES = [(3,), (257,), (64, 33), (0,), (17, 3, 85), ()]
ADAM = CASES[0]


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    """Two groups; the second overrides what every optimizer has."""
    return [dict(params=params[::2]), dict(params=params[1::2], lr=0.02, weight_decay=0.05)]


def torch_kwargs(case: Case) -> dict[str, Any]:
    """What of a row its reference takes; capturable changes no number and needs a GPU there."""
    assert case.reference is not None
    names = inspect.signature(case.reference.__init__).parameters
    known = {key: value for key, value in case.kwargs.items() if key in names}
    decay = case.kwargs.get("weight_decay", 0)  # AdamW's own default is another
    known |= dict(foreach=False, weight_decay=decay)
    return known | dict(capturable=False) if "capturable" in names else known


def run_rule(
    case: Case, dtype: torch.dtype, params: list[Tensor], options: list[Any], grads: list[Any]
) -> list[States]:
    """All steps of the rule alone: the weight and the states of each parameter."""
    ends = []
    for i, (param, group) in enumerate(zip(params, options, strict=True)):
        weight = param.detach().cpu().to(dtype).flatten()
        states = {name: torch.zeros_like(weight) for name in case.state_names}
        step = 0
        for of_step in grads:
            if of_step[i] is not None:
                step += 1
                grad = of_step[i].to(dtype).flatten()
                weight, states = case.rule(weight, grad, states, step, group)
        ends.append({"weight": weight, **states})
    return ends


def run_torch(
    case: Case, dtype: torch.dtype, params: list[Tensor], grads: list[Any]
) -> list[States]:
    assert case.reference is not None
    mine = [Parameter(param.detach().cpu().clone().to(dtype)) for param in params]
    kwargs = torch_kwargs(case)
    # torch computes what is derived from tensors in their dtype.
    if isinstance(kwargs.get("lr"), Tensor):
        kwargs["lr"] = kwargs["lr"].to(dtype)
    if "betas" in kwargs and isinstance(kwargs["betas"][0], Tensor):
        kwargs["betas"] = tuple(beta.to(dtype) for beta in kwargs["betas"])
    optimizer = case.reference(groups_of(mine), **kwargs)
    for of_step in grads:
        for param, grad in zip(mine, of_step, strict=True):
            param.grad = None if grad is None else grad.to(dtype)
        optimizer.step()
    return [
        {"weight": p.detach().flatten()}
        | {name: optimizer.state[p][name].flatten() for name in case.state_names}
        for p in mine
    ]


def random_grads(params: list[Tensor], steps: int) -> list[list[Tensor | None]]:
    """Gradients of several steps; a later one is missing now and then."""
    missing = {(2, 1), (2, 2), (3, 1), (5, 0)}
    return [
        [None if (t, i) in missing else torch.randn(p.shape) for i, p in enumerate(params)]
        for t in range(steps)
    ]


def options_of(optimizer: Any, params: list[Tensor]) -> list[Any]:
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    return [of[p] for p in params]


@pytest.mark.parametrize("case", [c for c in CASES if c.reference], ids=str)
def test_the_rule_in_fp64_is_torch(case: Case) -> None:
    params: list[Tensor] = list(new_params(case, torch.device("cpu"), SHAPES))
    grads = random_grads(params, 6)
    options = options_of(make(case, groups_of(params)), params)
    ours = run_rule(case, torch.float64, params, options, grads)
    theirs = run_torch(case, torch.float64, params, grads)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_as_exact_as_torch(case: Case, device: torch.device, backend: str) -> None:
    params: list[Tensor] = list(new_params(case, device, SHAPES))
    grads = random_grads(params, 6)
    optimizer = make(case, groups_of(params))
    options = options_of(optimizer, params)
    wanted = run_rule(case, torch.float64, params, options, grads)
    if case.reference is None:
        theirs = run_rule(case, torch.float32, params, options, grads)
    else:
        theirs = run_torch(case, torch.float32, params, grads)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = None if grad is None else grad.to(device)
        optimizer.step()
    assert optimizer.backend == backend
    for name in ("weight", *case.state_names):
        errors: list[list[Tensor]] = [[], []]
        for param, their, want in zip(params, theirs, wanted, strict=True):
            our = param if name == "weight" else optimizer.state[param][name]
            errors[0].append(in_ulps(name, flat(our).cpu(), want[name]))
            errors[1].append(in_ulps(name, their[name], want[name]))
        (ours_all, theirs_all) = (torch.cat(e) for e in errors)
        assert ours_all.max() <= 1.5 * theirs_all.max() + 1, name
        assert ours_all.square().mean().sqrt() <= 1.5 * theirs_all.square().mean().sqrt() + 0.1, (
            name
        )
    for i, param in enumerate(params):
        steps = sum(of_step[i] is not None for of_step in grads)
        assert optimizer.state[param]["step"].dtype == torch.float32
        assert optimizer.state[param]["step"] == steps


@pytest.mark.parametrize(
    "case", by_id(CASES, "adam-decay", "adam-l2-amsgrad", "sgd-dampening", "lion-default"), ids=str
)
def test_dtypes_mix_and_gradients_come_and_go(
    case: Case, device: torch.device, backend: str
) -> None:
    """Each parameter is stepped as if it were alone, from its own first gradient on."""
    params = [
        Parameter(torch.randn(shape).to(device, dtype))
        for shape in [(5,), (300,), (129, 64)]
        for dtype in (F32, BF16, F16)
    ]
    optimizer = make(case, groups_of(params))
    for _ in range(6):
        set_grads(params, missing=0.4)
        checked_step(case, optimizer)
    assert optimizer.backend == backend
    steps = {int(optimizer.state[param]["step"]) for param in params}
    assert len(steps) > 1


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_every_size_and_alignment(case: Case, device: torch.device, backend: str) -> None:
    aligned = new_params(case, device, [(size,) for size in SIZES])
    off_by_one = [
        Parameter(torch.randn(size + 1).to(device, case.dtype)[1:]) for size in SIZES if size
    ]
    check_sizes(case, aligned, off_by_one, backend)


@pytest.mark.parametrize(
    "case", by_id(EVERY, "adam-default", "adam-bf16-param", "adam-remainder-fp8"), ids=str
)
def test_large_sizes(case: Case, device: torch.device, backend: str) -> None:
    check_sizes(case, new_params(case, device, [(size,) for size in LARGE_SIZES]), [], backend)


def check_sizes(
    case: Case, aligned: list[Parameter], off_by_one: list[Parameter], backend: str
) -> None:
    groups = [dict(params=aligned), dict(params=off_by_one, lr=0.02)]
    optimizer = make(case, groups if off_by_one else groups[:1])
    optimizer.init_state()  # an fp16 master rounds the parameter that it starts from
    for _ in range(2):
        set_grads(all_params(optimizer))
        checked_step(case, optimizer)
    assert optimizer.backend == backend


def test_gradients_off_by_one(device: torch.device, backend: str) -> None:
    for case in (ADAM, *NARROW[:2]):
        params = new_params(case, device, [(4095,), (4096,), (9000,)])
        optimizer = make(case, params)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.numel() + 1).to(param)[1:]
            checked_step(case, optimizer)
        assert optimizer.backend == backend


def strided(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of `values` with just these strides, even where a size of 1 makes one meaningless."""
    out = torch.empty(values.numel(), device=values.device, dtype=values.dtype)
    return out.as_strided(values.shape, strides).copy_(values)


LAYOUTS = {
    "transposed grad": ((4, 3), (3, 1), (1, 4)),
    "transposed param": ((4, 3), (1, 4), (3, 1)),
    "channels_last param": ((2, 8, 5, 7), (280, 1, 56, 8), (280, 35, 7, 1)),
    "channels_last grad": ((2, 8, 5, 7), (280, 35, 7, 1), (280, 1, 56, 8)),
    "both channels_last": ((2, 8, 5, 7), (280, 1, 56, 8), (280, 1, 56, 8)),
    "odd stride of a size 1": ((3, 1, 5), (5, 77, 1), (5, 1, 1)),
    "odd stride of a last size 1": ((6, 1), (1, 1), (1, 999)),
    "large, transposed": ((96, 80), (80, 1), (1, 96)),
    "expanded grad": ((4, 3), (3, 1), (0, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", by_id(EVERY, "adam-decay", "adam-remainder-fp8"), ids=str)
def test_layouts(case: Case, layout: str, device: torch.device, backend: str) -> None:
    """A gradient laid out unlike its parameter gives the bits of one laid out alike."""
    shape, param_strides, grad_strides = LAYOUTS[layout]
    start = torch.randn(shape).to(device, case.dtype)
    params = [Parameter(strided(start, param_strides)) for _ in range(2)]
    assert params[0].stride() == param_strides
    optimizer = make(case, params[:1])
    twin = make(case, params[1:])
    for _ in range(3):
        grad = torch.randn(shape).to(device, case.dtype)
        grad = grad[:1].expand(shape) if 0 in grad_strides else strided(grad, grad_strides)
        params[0].grad = grad
        params[1].grad = strided(grad, param_strides)
        checked_step(case, optimizer)
        twin.step()
    assert optimizer.backend == backend
    assert_same_bits(snapshot(optimizer), snapshot(twin))


def test_many_tensors(device: torch.device, backend: str) -> None:
    check_many_tensors(300, 3, device, backend)


@pytest.mark.parametrize(("count", "group_count"), [(5000, 7), (5000, 1000)])
def test_more_than_one_launch_holds(
    count: int, group_count: int, device: torch.device, native: str
) -> None:
    check_many_tensors(count, group_count, device, native)


def check_many_tensors(count: int, group_count: int, device: torch.device, backend: str) -> None:
    """The same as one large tensor per group."""
    shapes = [(i % 5,) for i in range(count)]
    params = new_params(ADAM, device, shapes)
    per_group = [params[i::group_count] for i in range(group_count)]
    lrs = [0.01 + 0.001 * i for i in range(group_count)]
    many = make(ADAM, [dict(params=ps, lr=lr) for ps, lr in zip(per_group, lrs, strict=True)])
    joined = [Parameter(torch.cat([p.detach() for p in ps])) for ps in per_group]
    few = make(ADAM, [dict(params=[p], lr=lr) for p, lr in zip(joined, lrs, strict=True)])
    for _ in range(2):
        set_grads(params)
        for whole, ps in zip(joined, per_group, strict=True):
            whole.grad = torch.cat([p.grad for p in ps if p.grad is not None])
        many.step()
        few.step()
    assert many.backend == few.backend == backend
    for whole, ps in zip(joined, per_group, strict=True):
        torch.testing.assert_close(torch.cat(list(ps)), whole, rtol=1e-6, atol=1e-7)
        for name in ADAM.state_names:
            parts = torch.cat([many.state[p][name] for p in ps])
            torch.testing.assert_close(parts, few.state[whole][name], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("fused", ["FusedAdam", "FusedSGD", "FusedLion"])
def test_every_option_may_differ_per_group(fused: str, device: torch.device, backend: str) -> None:
    """One optimizer whose groups override everything: the bits of one optimizer per group."""
    rows = [case for case in EVERY if case.fused == fused]
    start = [new_params(case, device, [(300,), (5000,)]) for case in rows]
    copies = [[Parameter(p.detach().clone()) for p in params] for params in start]
    one = make(
        rows[0], [dict(case.kwargs, params=ps) for case, ps in zip(rows, start, strict=True)]
    )
    each = [make(case, params) for case, params in zip(rows, copies, strict=True)]
    for _ in range(2):
        set_grads(all_params(one))
        targets = chain.from_iterable(copies)
        for source, target in zip(chain.from_iterable(start), targets, strict=True):
            target.grad = source.grad
        one.step()
        for optimizer in each:
            optimizer.step()
    assert one.backend == backend
    assert_same_bits(snapshot(one), [t for optimizer in each for t in snapshot(optimizer)])


@pytest.mark.parametrize(
    "case", by_id(CASES, "adam-default", "sgd-momentum", "lion-default"), ids=str
)
@pytest.mark.parametrize("order", [(8, 0), (0, 8), (8, 0, 8), (0,)], ids=str)
def test_an_empty_tensor(
    case: Case, order: tuple[int, ...], device: torch.device, backend: str
) -> None:
    params = [Parameter(torch.ones(size, device=device)) for size in order]
    optimizer = make(case, params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.backend == backend
    for param in params:
        torch.testing.assert_close(param.detach(), torch.full_like(param, 0.9), rtol=1e-6, atol=0)
        assert optimizer.state[param]["step"] == 1
        for name in case.state_names:
            assert optimizer.state[param][name].shape == param.shape


def test_the_first_gradient_starts_a_buffer(device: torch.device, backend: str) -> None:
    """Per tensor: the second one gets its first gradient at step 3."""
    (case,) = by_id(CASES, "sgd-dampening")
    params = [Parameter(torch.ones(4, device=device)) for _ in range(2)]
    optimizer = make(case, params, dampening=0)
    for step in range(3):
        params[0].grad = torch.ones(4, device=device)
        params[1].grad = torch.ones(4, device=device) if step == 2 else None
        optimizer.step()
    assert optimizer.backend == backend
    for param, want in zip(params, (2.71, 1.0), strict=True):
        buffer = optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(buffer, torch.full_like(buffer, want), rtol=1e-6, atol=0)


def test_without_gradients_nothing_happens(device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(3,), (5000,)])
    optimizer = make(ADAM, params, weight_decay=0.1)
    before = snapshot(optimizer)
    assert optimizer.step(lambda: 7.5) == 7.5
    assert not optimizer.state
    assert_same_bits(snapshot(optimizer), before)
    set_grads(params)
    optimizer.step()
    assert optimizer.backend == backend
    after = snapshot(optimizer)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
    assert optimizer.step() is None
    assert_same_bits(snapshot(optimizer), after)


def test_frozen_parameters_are_left_alone(device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(3,), (3,)])
    params[0].requires_grad_(False)
    optimizer = make(ADAM, params, weight_decay=0.1)
    before = params[0].detach().clone()
    set_grads(params[1:])
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state


def test_closure_computes_gradients(device: torch.device, backend: str) -> None:
    param = Parameter(torch.ones(4, device=device))
    optimizer = make(ADAM, [param], lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = (param * param).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 4
    assert optimizer.backend == backend
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.9))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_propagates_as_in_torch(
    value: float, device: torch.device, backend: str
) -> None:
    for case in by_id(CASES, "adam-default", "adam-l2-amsgrad", "sgd-nesterov"):
        start = torch.randn(40)
        start[7] = value
        param, theirs = Parameter(start.to(device)), Parameter(start.clone())
        assert case.reference is not None
        optimizer, reference = make(case, [param]), case.reference([theirs], **torch_kwargs(case))
        for _ in range(3):
            grad = torch.randn(40)
            grad[3] = value
            param.grad, theirs.grad = grad.to(device), grad
            optimizer.step()
            reference.step()
        assert optimizer.backend == backend
        torch.testing.assert_close(param.detach().cpu(), theirs.detach(), equal_nan=True)
        for name in case.state_names:
            ours = optimizer.state[param][name].cpu()
            torch.testing.assert_close(ours, reference.state[theirs][name], equal_nan=True)


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.6, 0.9])
def test_a_lerp_goes_from_torch_s_end(beta1: float, device: torch.device, backend: str) -> None:
    """So that the same elements are infinite or NaN."""
    grads = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, torch.nan, 1, 0], device=device)
    params = [Parameter(torch.ones(7, device=device)) for _ in range(2)]
    ours: Any = fusedopt.FusedAdam([params[0]], betas=(beta1, 0.9))
    theirs = torch.optim.AdamW([params[1]], betas=(beta1, 0.9), weight_decay=0)
    for sign in (1, -1, 1):
        for param in params:
            param.grad = sign * grads
        ours.step()
        theirs.step()
        got, want = ours.state[params[0]]["exp_avg"], theirs.state[params[1]]["exp_avg"]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)
    assert ours.backend == backend


def test_autograd_notices_the_update(device: torch.device, backend: str) -> None:
    param = Parameter(torch.ones(4, device=device))
    optimizer = make(ADAM, [param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    loss: Any = (param * param).sum()
    version = param._version
    optimizer.step()
    assert optimizer.backend == backend
    assert param._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_gradients_are_only_read(case: Case, device: torch.device, backend: str) -> None:
    params = new_params(case, device, [(300,), (5000,)])
    optimizer = make(case, params, maximize=True)
    set_grads(params)
    before = [bits(param.grad).clone() for param in params if param.grad is not None]
    optimizer.step()
    assert optimizer.backend == backend
    assert_same_bits([bits(param.grad) for param in params if param.grad is not None], before)


@pytest.mark.parametrize("grad_dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("case", by_id(EVERY, "adam-remainder-fp8", "adam-bf16-param"), ids=str)
def test_decoupled_gradients(
    case: Case, grad_dtype: torch.dtype, device: torch.device, backend: str
) -> None:
    params = new_params(case, device, [(300,), (5000,), (7,)])
    optimizer = make(case, params, use_decoupled_grad=True)
    for _ in range(2):
        for param in params[:2]:
            decoupled = torch.randn(param.shape).to(device, grad_dtype)
            setattr(param, "decoupled_grad", decoupled)  # noqa: B010
            param.grad = torch.full_like(param, torch.nan)
        checked_step(case, optimizer)
    assert optimizer.backend == backend
    assert params[2] not in optimizer.state
    optimizer.zero_grad(set_to_none=False)
    for param in params[:2]:
        assert not gradient(param).any()
    optimizer.zero_grad()
    assert [gradient(param) for param in params[:2]] == [None, None]


def gradient(param: Tensor) -> Any:
    return getattr(param, "decoupled_grad")  # noqa: B009


def test_gradients_of_another_dtype(device: torch.device, backend: str) -> None:
    """`p.grad_dtype` lets torch accumulate fp32 gradients of bf16 parameters."""
    (case,) = by_id(NARROW, "adam-bf16-param")
    (param,) = new_params(case, device, [(5000,)])
    param.grad_dtype = F32
    optimizer = make(case, [param])
    for _ in range(2):
        param.grad = torch.randn(5000, device=device)
        checked_step(case, optimizer)
    assert optimizer.backend == backend


def test_hyperparameters_may_change_between_steps(device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(3,), (5000,)])
    optimizer = make(ADAM, params)
    for key, value in [
        ("lr", 0.05),
        ("lr", torch.tensor(0.02)),
        ("lr", torch.tensor(0.01, device=device)),
        ("betas", (0.5, 0.9)),
        ("eps", 1e-3),
        ("weight_decay", 0.3),
        ("maximize", True),
        ("adam_w_mode", False),
        ("bias_correction", False),
    ]:
        optimizer.param_groups[0][key] = value
        set_grads(params)
        checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


def test_parameters_may_move_in_memory(device: torch.device, backend: str) -> None:
    """New storage for parameters and gradients between steps is found."""
    params = new_params(ADAM, device, [(3,), (5000,)])
    optimizer = make(ADAM, params)
    kept = []
    for _ in range(3):
        for param in params:
            kept.append(param.data)
            param.data = param.data.clone()
        set_grads(params)
        checked_step(ADAM, optimizer)
    assert optimizer.backend == backend
    assert kept


@pytest.mark.slow
@pytest.mark.gpu
def test_beyond_32_bit_indices() -> None:
    size = 2**31 + 5
    param = Parameter(torch.zeros(size, dtype=BF16, device="cuda"))
    (case,) = by_id(EVERY, "adam-24-bit-fp8")
    optimizer = make(case, [param], lr=0.1, weight_decay=0)
    param.grad = torch.zeros_like(param)
    param.grad[:5] = param.grad[-5:] = 1
    optimizer.step()
    assert optimizer.backend == "cuda"
    expected = torch.full((5,), -0.1, dtype=BF16, device="cuda")
    torch.testing.assert_close(param.detach()[:5], expected)
    torch.testing.assert_close(param.detach()[-5:], expected)
    assert torch.count_nonzero(param.detach()[5:-5]) == 0
