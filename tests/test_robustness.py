"""What users do to parameters, states and groups between steps is seen, or an error names it."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor

from fusedopt import FusedAdam, FusedLion, FusedSGD, fp8_dequantize, fp8_parameter

FP8 = dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")


def new_param(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.randn(shape, device=device).to(dtype))


def run(optimizer: Any, params: list[Parameter], steps: int = 3) -> None:
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()


def ones(*params: Parameter) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, FP8),
    (torch.bfloat16, dict(store_param_remainders=True)),
    (torch.bfloat16, dict(master_weights=True, master_weight_dtype="fp16", **FP8)),
]


@pytest.mark.parametrize(("dtype", "options"), MODES)
def test_another_layout(
    dtype: torch.dtype, options: dict[str, Any], device: torch.device, backend: str
) -> None:
    """States follow `p.data` into another layout, at another address and at the same one."""
    param = new_param(device, 8, 16, 6, 8, dtype=dtype)
    square = new_param(device, 70, 70, dtype=dtype)
    optimizer = FusedAdam([param, square], **options)
    run(optimizer, [param, square])
    names = ("exp_avg", "exp_avg_sq")
    before = {n: optimizer.get_unscaled_state(param, n) for n in names}
    turned = {n: optimizer.get_unscaled_state(square, n) for n in names}
    param.data = param.data.to(memory_format=torch.channels_last)
    square.data = square.data.t()
    optimizer.init_state()
    for name in names:
        scale = before[name].abs().max() * (0.13 if options.get("exp_avg_dtype") else 0)
        torch.testing.assert_close(
            optimizer.get_unscaled_state(param, name), before[name], rtol=0, atol=float(scale)
        )
        scale = turned[name].abs().max() * (0.13 if options.get("exp_avg_dtype") else 0)
        torch.testing.assert_close(
            optimizer.get_unscaled_state(square, name), turned[name], rtol=0, atol=float(scale)
        )
    run(optimizer, [param, square])
    assert optimizer.backend == backend


def test_another_shape(device: torch.device, backend: str) -> None:
    """Also at the same address; nothing is read or written outside."""
    param = new_param(device, 1000)
    optimizer = FusedAdam([param], lr=0.1)
    run(optimizer, [param])
    param.data = param.data[:10]
    ones(param)
    before = param.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of group 0 has shape \(10,\), its exp_avg"
    ):
        optimizer.step()
    assert torch.equal(param, before)
    del optimizer.state[param]
    optimizer.step()
    torch.testing.assert_close(param.detach(), before - 0.1)
    plain = FusedSGD([param], lr=1.0)  # without state any shape will do
    for size in (4, 7):
        param.data = torch.zeros(size, device=device)
        ones(param)
        plain.step()
        assert torch.equal(param, torch.full_like(param, -1.0))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (dict(store_param_remainders=True), dict(store_param_remainders=False)),
        (
            dict(store_param_remainders=True),
            dict(master_weights=True, store_param_remainders=False),
        ),
        (dict(master_weights=True), dict(master_weight_dtype=torch.float16)),
        (dict(master_weights=True), dict(master_weights=False)),
        (dict(master_weight_bits=24), dict(master_weight_bits=None, store_param_remainders=True)),
        (dict(exp_avg_dtype="bf16"), dict(exp_avg_dtype="fp8")),
        ({}, dict(amsgrad=True)),
    ],
)
def test_a_group_asks_for_another_form(
    first: dict[str, Any], then: dict[str, Any], device: torch.device, backend: str
) -> None:
    """Converted in place: the weight goes on from where it was."""
    param = new_param(device, 5000, dtype=torch.bfloat16)
    optimizer = FusedAdam([param], lr=1e-6, **first)
    run(optimizer, [param])
    before = param.detach().float()
    optimizer.param_groups[0].update(then)
    run(optimizer, [param], steps=1)
    ulp = before.abs() * 2.0**-7 + 1e-6
    assert ((param.detach().float() - before).abs() <= ulp).all()
    assert optimizer.backend == backend


def test_half_after_remainders(device: torch.device, backend: str) -> None:
    param = new_param(device, 5000, dtype=torch.bfloat16)
    optimizer = FusedAdam([param], lr=1e-6, store_param_remainders=True)
    run(optimizer, [param])
    before = param.detach().float()
    param.grad, param.data = None, param.data.half()
    run(optimizer, [param], steps=1)
    assert ((param.detach().float() - before).abs() <= before.abs() * 2.0**-7 + 1e-6).all()


def test_a_master_that_was_off_is_not_an_old_one(device: torch.device, backend: str) -> None:
    param = new_param(device, 5000, dtype=torch.bfloat16)
    optimizer = FusedAdam([param], lr=0.01, master_weights=True)
    for wanted in (True, False, True):
        optimizer.param_groups[0]["master_weights"] = wanted
        run(optimizer, [param], steps=5)
        before = param.detach().float()
    ones(param)
    optimizer.step()
    assert (param.detach().float() - before).abs().max() < 0.05


@pytest.mark.parametrize("how", ["replace", "offload", "clear", "new dict"])
def test_state_in_the_users_hands(how: str, device: torch.device, backend: str) -> None:
    param = Parameter(torch.zeros(8, device=device))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    ones(param)
    optimizer.step()
    state = optimizer.state[param]
    if how == "replace":
        state["momentum_buffer"] = torch.full_like(param.detach(), 4.0)
    elif how == "offload":
        for name in list(state):
            state[name] = state[name].cpu()
    elif how == "clear":
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)
    optimizer.step()
    wanted = {"replace": 3.0, "offload": 1.5, "clear": 1.0, "new dict": 1.0}[how]
    assert torch.equal(optimizer.state[param]["momentum_buffer"].cpu(), torch.full((8,), wanted))
    assert torch.equal(param.cpu(), torch.full((8,), -1.0 - wanted))
    assert type(optimizer.state_dict()["state"][0]) is dict


def edit_append(optimizer: Any, new: Parameter) -> None:
    optimizer.param_groups[1]["params"].append(new)


def edit_replace(optimizer: Any, new: Parameter) -> None:
    optimizer.param_groups[1]["params"] = [new]


@pytest.mark.parametrize("edit", [edit_append, edit_replace])
def test_groups_edited(
    edit: Callable[[Any, Parameter], None], device: torch.device, backend: str
) -> None:
    a, b, new = (Parameter(torch.zeros(3, device=device)) for _ in range(3))
    groups: list[dict[str, Any]] = [dict(params=[a]), dict(params=[b], lr=10.0)]
    optimizer = FusedSGD(groups, lr=1.0)
    ones(a, b, new)
    optimizer.step()
    edit(optimizer, new)
    optimizer.step()
    assert torch.equal(new, torch.full_like(new, -10.0))
    assert float(b.detach()[0]) == (-20.0 if edit is edit_append else -10.0)
    optimizer.param_groups.reverse()
    optimizer.step()
    assert torch.equal(a, torch.full_like(a, -3.0))


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "bf16"])
def test_plain_states_are_no_block_scaled_ones(
    dtype: str, device: torch.device, backend: str
) -> None:
    """torch.optim keeps fp16 states of fp16 parameters: the values themselves."""
    param = new_param(device, 5000, dtype=torch.float16)
    theirs = torch.optim.Adam([param], eps=1e-3)
    run(theirs, [param])
    ours = FusedAdam([param], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    grid = {"fp16": 2.0**-10, "fp8": 2.0**-3, "bf16": 2.0**-7}[dtype]
    want = theirs.state[param]["exp_avg"].float()
    got = ours.get_unscaled_state(param, "exp_avg")
    assert ((got - want).abs() <= grid * want.abs() + want.abs().max() * 2.0**-16).all()
    run(ours, [param], steps=1)
    assert ours.backend == backend


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_momentum_survives_conversion(
    dtype: str | None, device: torch.device, backend: str
) -> None:
    param = Parameter(torch.zeros(5000, device=device, dtype=torch.bfloat16))
    theirs = torch.optim.SGD([param], lr=1.0, momentum=0.5)
    for _ in range(2):
        ones(param)
        theirs.step()
    ours = FusedSGD([param], lr=1.0, momentum=0.5, momentum_dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    buffer = ours.get_unscaled_state(param, "momentum_buffer")
    assert torch.equal(buffer, torch.full_like(buffer, 1.75))


def test_a_buffer_that_is_set_is_used(device: torch.device, backend: str) -> None:
    param = Parameter(torch.zeros(8, device=device))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    optimizer.set_scaled_state(param, "momentum_buffer", torch.full((8,), 8.0, device=device))
    ones(param)
    optimizer.step()
    assert torch.equal(param, torch.full_like(param, -5.0))


def test_a_file_that_does_not_fit_changes_nothing(device: torch.device, backend: str) -> None:
    params = [new_param(device, 5000, dtype=torch.bfloat16) for _ in range(2)]
    optimizer = FusedAdam(params, store_param_remainders=True, exp_avg_dtype="fp8")
    run(optimizer, params)
    good = copy.deepcopy(optimizer.state_dict())
    before = [param.detach().clone() for param in params]
    for name, value, message in (
        ("exp_avg", [1.0], "exp_avg of parameter 1 is of type list in the checkpoint"),
        ("exp_avg_scale", torch.ones(3), r"exp_avg_scale of parameter 1 has shape \(3,\)"),
        ("master_param", torch.ones(3), r"master_param of parameter 1 has shape \(3,\)"),
    ):
        bad = copy.deepcopy(good)
        bad["state"][1][name] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        now = optimizer.state_dict()["state"]
        assert all(torch.equal(now[i][n], v) for i in (0, 1) for n, v in good["state"][i].items())


def test_gradients_that_are_views(device: torch.device, backend: str) -> None:
    """A lazily negated gradient, and one that nobody else keeps alive."""
    param = Parameter(torch.zeros(600, device=device))
    optimizer = FusedSGD([param], lr=1.0)
    param.grad = torch._neg_view(torch.ones(600, device=device))
    optimizer.step()
    assert torch.equal(param, torch.ones_like(param))

    class Fresh(Parameter):
        @property
        def decoupled_grad(self) -> Tensor:
            return torch.ones(600, device=self.device)

    fresh = Fresh(torch.zeros(600, device=device))
    FusedSGD([fresh], lr=1.0, use_decoupled_grad=True).step()
    assert torch.equal(fresh.detach(), torch.full((600,), -1.0, device=device))


def test_wrappers_are_errors(device: torch.device, backend: str) -> None:
    inner = torch.ones(4, device=device)
    with pytest.raises(TypeError, match="parameter 0 of group 0 is a TwoTensor"):
        FusedAdam([Parameter(TwoTensor(inner, inner.clone()))])


@pytest.mark.parametrize("what", ["lr", "betas"])
def test_values_set_at_run_time(what: str, device: torch.device, backend: str) -> None:
    param = Parameter(torch.zeros(4, device=device))
    optimizer = FusedAdam([param], lr=1.0)
    ones(param)
    optimizer.step()
    if what == "betas":
        optimizer.param_groups[0]["betas"] = [0.5, 0.9]
        optimizer.step()
        return
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = torch.ones(2, device=device)
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.step()
    assert torch.equal(param, before)


def test_fp8_parameters_and_their_copies(device: torch.device, backend: str) -> None:
    """Scales that are replaced are written; a deep copy keeps its own."""
    param = fp8_parameter(torch.randn(80, 80, device=device))
    optimizer = FusedAdam([param], lr=0.1, master_weights=True, use_decoupled_grad=True)
    twin = copy.deepcopy(param)
    param.decoupled_grad = torch.ones(80, 80, device=device, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    for _ in range(3):
        optimizer.step()
        param.fp8_scale_inv = param.fp8_scale_inv.clone()  # type: ignore[attr-defined]
    optimizer.step()
    master = optimizer.get_unscaled_state(param, "master_param")
    assert (fp8_dequantize(param) - master).abs().max() <= master.abs().max() * 2.0**-3
    assert (fp8_dequantize(twin) - fp8_dequantize(param)).abs().min() > 0.2
    assert optimizer.backend == backend
    tiny = fp8_parameter(torch.full((8,), 1e-40))
    assert fp8_dequantize(tiny).isfinite().all()


class Float8Tensor(torch.Tensor):
    """TransformerEngine's, as far as an optimizer looks at it."""

    def __init__(self, values: Tensor) -> None:
        self._scale_inv = torch.full((1,), 0.5, device=values.device)
        self._data = (values * 2).to(torch.float8_e4m3fn).view(torch.uint8)
        self._fp8_dtype = "DType.kFloat8E4M3"
        self._quantizer = type("Quantizer", (), {})()
        self._quantizer.scale = torch.full((1,), 2.0, device=values.device)
        self._quantizer.amax = torch.zeros(1, device=values.device)


def test_transformer_engines_parameters(device: torch.device, backend: str) -> None:
    values = torch.randn(70, 70, device=device).clamp(-3, 3)
    param = Float8Tensor(values.bfloat16())
    optimizer = FusedAdam([param], lr=0.1, master_weights=True, use_decoupled_grad=True)
    param.decoupled_grad = torch.ones(70, 70, device=device)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.step()
    stored = param._data.view(torch.float8_e4m3fn).float() * param._scale_inv
    master = optimizer.get_unscaled_state(param, "master_param")
    assert (stored - master).abs().max() <= 4 * 2.0**-3
    assert float(param._quantizer.scale) == 2.0  # the recipe's, not ours
    assert float(param._quantizer.amax) >= float(master.abs().max())
    assert optimizer.backend == backend


@pytest.mark.parametrize("grad", [1e25, 1.0, 0.0])
def test_lr_0_moves_nothing(grad: float, device: torch.device, backend: str) -> None:
    """Also where the second moment has overflowed."""
    param = Parameter(torch.ones(64, device=device))
    optimizer = FusedAdam([param], lr=0.0)
    for _ in range(3):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param))
    assert optimizer.backend == backend


@pytest.mark.parametrize("grad", [1e-13, 1e-17])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_tiny_gradients_without_eps(
    dtype: str, grad: float, device: torch.device, backend: str
) -> None:
    param = Parameter(torch.ones(4096, device=device))
    kept: Any = dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    optimizer = FusedAdam([param], lr=0.1, eps=0.0, **kept)
    for _ in range(3):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
    assert optimizer.backend == backend
    assert param.isfinite().all()
    # Kernels with block scales on a GPU add 2^-63 to roots: they move less, never more.
    approximate = device.type == "cuda" and backend == "cuda" and dtype == "fp16" and grad < 1e-15
    low, high = 0.7 - 1e-3, 1.0 if approximate else 0.7 + 1e-3
    assert ((param >= low) & (param <= high)).all()


def test_lion_without_a_memory(device: torch.device, backend: str) -> None:
    """With beta1 = 0 only the gradient's sign counts, however large the moment is."""
    param = Parameter(torch.ones(4, device=device))
    optimizer = FusedLion([param], lr=0.1, betas=(0.0, 0.99))
    for grad in (1e10, 1.0, 1.0):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.7))
    assert optimizer.backend == backend


def test_a_compiled_training_step(device: torch.device, backend: str) -> None:
    """torch.compile passes over planning, and over steps."""
    model = torch.nn.Linear(20, 20, device=device)
    twin = copy.deepcopy(model)
    optimizers = [FusedAdam(m.parameters(), lr=0.1) for m in (model, twin)]

    def train(x: Tensor) -> None:
        optimizers[0].zero_grad()
        model(x).square().mean().backward()
        optimizers[0].step()

    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        x = torch.randn(4, 20, device=device)
        compiled(x)
        optimizers[1].zero_grad()
        twin(x).square().mean().backward()
        optimizers[1].step()
    torch.testing.assert_close(model.weight, twin.weight)
    assert optimizers[0].backend == backend
