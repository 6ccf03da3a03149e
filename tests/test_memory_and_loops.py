"""What surrounds a step: memory given back, loops with scalers, tensors that are exchanged."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fusedopt
from fusedopt import FusedAdam, FusedLion, FusedSGD, clip_grad_norm_, fp8_parameter

INF = float("inf")


def param_on(device: torch.device, value: float = 1.0, count: int = 8, **options: Any) -> Parameter:
    param = Parameter(torch.full((count,), value, device=device, **options))
    param.grad = torch.ones_like(param)
    return param


# ---- memory --------------------------------------------------------------------------------------


def clear(optimizer: Any, param: Parameter) -> None:
    optimizer.state.clear()


def replace_by_nothing(optimizer: Any, param: Parameter) -> None:
    for name in list(optimizer.state[param]):
        optimizer.state[param][name] = None


def empty_data(optimizer: Any, param: Parameter) -> None:
    for value in optimizer.state[param].values():
        value.data = torch.empty(0, device=param.device)


def pop(optimizer: Any, param: Parameter) -> None:
    optimizer.state.pop(param)


@pytest.mark.parametrize("release", [clear, replace_by_nothing, empty_data, pop])
@pytest.mark.parametrize("in_backward", [False, True])
def test_states_can_be_given_back(
    release: Callable[[Any, Parameter], None],
    in_backward: bool,
    device: torch.device,
    backend: str,
) -> None:
    param = param_on(device)
    model = torch.nn.ParameterList([param])
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    if in_backward:
        fusedopt.step_in_backward(model, optimizer)
        param.square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    memory = [v.untyped_storage()._weak_ref() for v in optimizer.state[param].values()]
    release(optimizer, param)
    gc.collect()
    storages: Any = torch.UntypedStorage
    assert [bool(storages._expired(weak)) for weak in memory] == [True] * 3
    for weak in memory:
        storages._free_weak_ref(weak)


def test_parameters_that_are_exchanged_are_forgotten(device: torch.device, backend: str) -> None:
    """As when points are added to a scene and taken away: a parameter leaves, another one comes."""
    param = param_on(device)
    optimizer = FusedAdam([param], lr=0.1)
    old: list[Any] = []
    for _ in range(4):
        optimizer.step()
        state = optimizer.state.pop(param)
        new = Parameter(param.detach().clone())
        new.grad = torch.ones_like(new)
        optimizer.param_groups[0]["params"][0] = new
        optimizer.state[new] = state
        old.append(weakref.ref(param))
        param = new
    optimizer.step()
    del state, new
    gc.collect()
    assert [ref() for ref in old] == [None] * 4
    assert optimizer.state[param]["step"] == 5


def test_parameters_can_be_swapped(device: torch.device, backend: str) -> None:
    """torch.utils.swap_tensors, by which a module changes its dtype if torch is told to."""
    torch.manual_seed(0)
    a, b = param_on(device), param_on(device, 2.0)
    a.grad = None
    b.grad = None
    optimizer = FusedSGD([a, b], lr=0.1)
    for param in (a, b):
        param.grad = torch.ones_like(param)
    optimizer.step()
    a.grad, b.grad = None, None
    torch.utils.swap_tensors(a, b)  # type: ignore[no-untyped-call]
    assert a[0].item() == pytest.approx(1.9)
    assert b[0].item() == pytest.approx(0.9)
    a.grad = torch.ones_like(a)
    before = b.detach().clone()
    optimizer.step()
    assert a[0].item() == pytest.approx(1.8)
    assert torch.equal(b, before)


def test_a_module_changes_its_dtype_by_swapping(
    device: torch.device, backend: str, swapping: None
) -> None:
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.bfloat16()
    model(torch.ones(1, 4, device=device, dtype=torch.bfloat16)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert model.weight.dtype is torch.bfloat16
    assert not torch.equal(model.weight, before)


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


# ---- scalers and clipping ------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [4.0, INF])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("limit", [None, 1e9])
def test_decoupled_gradients_and_a_scaler(
    grad: float, both: bool, limit: float | None, device: torch.device, backend: str
) -> None:
    p, q = Parameter(torch.ones(4, device=device)), param_on(device, count=4)
    groups: list[dict[str, Any]] = [
        {"params": [p], "use_decoupled_grad": True},
        {"params": [q] if both else []},
    ]
    optimizer = FusedSGD(groups, lr=0.1, max_grad_norm=limit)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    p.decoupled_grad = torch.full((4,), grad, device=device)  # type: ignore[attr-defined]
    q.grad = torch.full((4,), 4.0, device=device)
    optimizer.step(grad_scaler=scaler)
    scaler.update()
    wanted = 1.0 if grad == INF else 0.9
    assert p[0].item() == pytest.approx(wanted, abs=1e-6)
    assert not both or q[0].item() == pytest.approx(wanted, abs=1e-6)
    assert scaler.get_scale() == (2.0 if grad == INF else 4.0)
    assert bool(optimizer.last_step_skipped) == (grad == INF)


def test_a_scaler_that_cannot_see_decoupled_gradients(device: torch.device, backend: str) -> None:
    p = param_on(device)
    optimizer = FusedSGD([p], lr=0.1, use_decoupled_grad=True)
    p.decoupled_grad = torch.ones_like(p)  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(grad_scaler=scaler\)"):
        scaler.step(optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    optimizer.__dict__.pop("grad_scale", None)
    optimizer.__dict__.pop("found_inf", None)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        optimizer.step(grad_scaler=scaler)
    assert torch.equal(p, torch.ones_like(p))


def test_a_scaler_lets_nobody_step_twice(device: torch.device, backend: str) -> None:
    p = param_on(device)
    optimizer = FusedSGD([p], lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))
    optimizer.step(grad_scaler=scaler)
    for step in (lambda: optimizer.step(grad_scaler=scaler), lambda: scaler.step(optimizer)):
        with pytest.raises(RuntimeError, match="already"):
            step()
    scaler.update()
    optimizer.step(grad_scaler=scaler)
    assert p[0].item() == pytest.approx(0.8)


def test_nobody_has_decoupled_gradients(device: torch.device, backend: str) -> None:
    fusedopt._warned.clear()
    optimizer = FusedSGD([param_on(device)], lr=0.1, use_decoupled_grad=True)
    with pytest.warns(fusedopt.FusedOptWarning, match="decoupled_grad"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(dtype: torch.dtype, device: torch.device, backend: str) -> None:
    p = Parameter(torch.ones(8, device=device, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 25.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    torch.set_default_dtype(dtype)
    try:
        optimizer = FusedAdam([p], master_weights=True, max_grad_norm=1.0)
        optimizer.step()
        scaler.scale(torch.ones((), device=device, dtype=torch.float32))
        optimizer.step(grad_scaler=scaler)
        norm = clip_grad_norm_([p], 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.dtype is norm.dtype is torch.float32
    assert norm.item() == pytest.approx(25 * 8**0.5, rel=1e-6)
    assert optimizer.state[p]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["dense", "strided", "negative"])
def test_norms_are_fp32(kind: str, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    """A norm above what fp16 can hold, and of gradients that kernels do not take."""
    p = Parameter(torch.ones(2000, device=device, dtype=dtype))
    value = torch.full((4000,), 6e3, device=device, dtype=dtype)
    grads = {
        "dense": value[:2000].clone(),
        "strided": value[::2],
        "negative": torch._neg_view(value[:2000]),
    }
    p.grad = grads[kind]
    exact = p.grad.double().norm().item()
    norm = clip_grad_norm_([p], 1.0)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert p.grad.double().norm().item() == pytest.approx(1, rel=2e-2)
    if kind == "negative":
        assert (p.grad < 0).all()


@pytest.mark.parametrize("norm_type", ["x", None, float("nan"), b"2"])
def test_a_norm_type_that_is_none(norm_type: Any) -> None:
    param = param_on(torch.device("cpu"))
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_([param], 1.0, norm_type)
    with pytest.raises(TypeError, match="tensors, got int"):
        clip_grad_norm_([1], 1.0)  # type: ignore[list-item]


# ---- options and parameters that cannot be honoured --------------------------------------------


SWITCHES = {
    FusedAdam: ("amsgrad", "bias_correction", "adam_w_mode", "maximize", "capturable"),
    FusedSGD: ("nesterov", "wd_after_momentum", "maximize", "materialize_master_grads"),
    FusedLion: ("master_weights", "store_param_remainders", "use_decoupled_grad", "set_grad_none"),
}


@pytest.mark.parametrize(
    ("cls", "name"), [(c, name) for c, names in SWITCHES.items() for name in names]
)
@pytest.mark.parametrize("value", ["False", float("nan"), 2, b"x", [1]])
def test_switches_are_switches(cls: Any, name: str, value: Any) -> None:
    param = param_on(torch.device("cpu"))
    with pytest.raises(ValueError, match=f"{name} must be True or False, got"):
        cls([param], **{name: value})
    if name != "set_grad_none":
        optimizer = cls([param])
        with pytest.raises(ValueError, match=f"{name} must be True or False, got"):
            optimizer.add_param_group({"params": [param_on(torch.device("cpu"))], name: value})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", "x"),
        ("lr", None),
        ("lr", [0.1]),
        ("eps", "x"),
        ("betas", (0.9, "x")),
        ("betas", None),
    ],
)
def test_values_that_become_no_numbers(
    key: str, value: Any, device: torch.device, backend: str
) -> None:
    param = param_on(device)
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.step()
    before = copy.deepcopy(param), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=rf"{key}.*must be.*number"):
        optimizer.step()
    assert torch.equal(param, before[0])
    assert optimizer.state[param]["step"] == before[1][0]["step"]


def test_values_that_are_negative_views(device: torch.device, backend: str) -> None:
    """A view that negates its storage's numbers, as `.imag` of a conjugate gives one."""
    negated: Callable[[Tensor], Tensor] = torch._neg_view
    param = param_on(device)
    FusedSGD([param], lr=negated(torch.tensor(-0.1, device=device))).step()
    assert param[0].item() == pytest.approx(0.9)
    with pytest.raises(TypeError, match="resolve_neg"):
        FusedSGD([Parameter(negated(torch.ones(4, device=device)))])


def test_a_momentum_that_is_a_tensor(device: torch.device, backend: str) -> None:
    p, q = param_on(device), param_on(device)
    momentum = torch.tensor(0.0, device=device)
    ours = FusedSGD([p], lr=0.1, momentum=momentum)  # type: ignore[arg-type]
    theirs = torch.optim.SGD([q], lr=0.1, momentum=0.0)
    for step in range(4):
        if step == 1:
            momentum.fill_(0.9)
            theirs = torch.optim.SGD([q], lr=0.1, momentum=0.9)
            theirs.state[q]["momentum_buffer"] = torch.ones_like(q)
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("grad", ["freed", "zero"])
def test_gradients_that_have_no_memory(grad: str, device: torch.device, backend: str) -> None:
    p, q = param_on(device), param_on(device)
    optimizer = FusedAdam([p, q], lr=0.1, weight_decay=0.1)
    optimizer.step()
    before = p.detach().clone()
    if grad == "zero":
        p.grad = torch._efficientzerotensor(8, device=device)
        optimizer.step()
        assert optimizer.state[p]["step"] == 2
        assert not torch.equal(p, before)
    else:
        assert p.grad is not None
        p.grad.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError):
            optimizer.step()
        assert torch.equal(p, before)
        assert optimizer.state[q]["step"] == 1


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_a_parameter_without_a_gradient_stops_nobody(
    change: str, device: torch.device, backend: str
) -> None:
    p, q = param_on(device, count=12), param_on(device)
    optimizer = FusedAdam([p], lr=0.1)
    optimizer.step()
    p.grad = None
    p.data = p.data.double() if change == "dtype" else torch.zeros(15, device=device)
    optimizer.add_param_group({"params": [q], "amsgrad": True})
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.step()
    assert q[0].item() == pytest.approx(0.9)
    assert "max_exp_avg_sq" not in optimizer.state[p]
    with pytest.raises((TypeError, RuntimeError), match="parameter 0 of group 0"):
        optimizer.init_state()


def test_fp8_parameters_of_odd_numbers(device: torch.device) -> None:
    w = fp8_parameter(torch.tensor([INF, 1.0, -2.0], device=device))
    torch.testing.assert_close(
        fusedopt.fp8_dequantize(w), torch.tensor([2.0, 1.0, -2.0], device=device), rtol=0.07, atol=0
    )
    for bad in (torch.ones(2, dtype=torch.complex64), torch.ones(2).to_sparse(), torch.arange(3)):
        with pytest.raises(TypeError, match="float dtype"):
            fp8_parameter(bad)
    module = torch.nn.ParameterList([w]).half()
    with pytest.raises(TypeError, match="codes"):
        FusedAdam(module.parameters(), master_weights=True)


def test_an_option_switched_on_is_in_torchs_file(device: torch.device, backend: str) -> None:
    param = param_on(device)
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    theirs = torch.optim.AdamW([Parameter(param.detach().clone())], amsgrad=True)
    theirs.load_state_dict(optimizer.to_torch_state_dict())
    assert "max_exp_avg_sq" in optimizer.to_torch_state_dict()["state"][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state", None),
        ("state", [1]),
        ("state", {0: [1]}),
        ("state", {0: None}),
        ("param_groups", None),
        ("param_groups", [None]),
        ("param_groups", [{"lr": 0.1}]),
        ("param_groups", [{"lr": 0.1, "params": 0}]),
        ("param_groups", [{"lr": 0.1, "params": [0], "maximize": "x"}]),
        (None, "a string"),
    ],
    ids=str,
)
def test_a_checkpoint_that_is_none(name: str | None, value: Any) -> None:
    param = param_on(torch.device("cpu"))
    optimizer = FusedAdam([param], lr=0.1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    file = value if name is None else {**before, name: value}
    with pytest.raises(ValueError, match="must be"):
        optimizer.load_state_dict(file)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    optimizer.step()
    assert optimizer.state[param]["step"] == 2
