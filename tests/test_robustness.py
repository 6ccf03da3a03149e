"""What users do to parameters, states and groups between steps is seen, or an error names it."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor

from fusedopt import FusedAdam, FusedLion, FusedSGD, fp8_dequantize, fp8_parameter

FP8: dict[str, Any] = dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")


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


@pytest.mark.parametrize(
    "how", ["replace", "data", "share", "offload", "data offload", "clear", "new dict"]
)
def test_state_in_the_users_hands(how: str, device: torch.device, backend: str) -> None:
    param = Parameter(torch.zeros(8, device=device))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    ones(param)
    optimizer.step()
    state = optimizer.state[param]
    if how == "replace":
        state["momentum_buffer"] = torch.full_like(param.detach(), 4.0)
    elif how == "data":
        state["momentum_buffer"].data = torch.full_like(param.detach(), 4.0)
    elif how == "share":
        state["momentum_buffer"].share_memory_()
    elif how == "offload":
        for name in list(state):
            state[name] = state[name].cpu()
    elif how == "data offload":
        for value in state.values():
            value.data = value.data.cpu()
    elif how == "clear":
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)
    optimizer.step()
    wanted = {"replace": 3.0, "data": 3.0, "clear": 1.0, "new dict": 1.0}.get(how, 1.5)
    assert torch.equal(optimizer.state[param]["momentum_buffer"].cpu(), torch.full((8,), wanted))
    assert torch.equal(param.cpu(), torch.full((8,), -1.0 - wanted))
    assert type(optimizer.state_dict()["state"][0]) is dict


def replace_data(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def share(tensor: Tensor) -> None:
    tensor.share_memory_()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("move", [replace_data, share])
@pytest.mark.parametrize(
    "name", ["step", "exp_avg", "exp_avg_sq_scale", "master_param", "master_param_scale"]
)
def test_one_tensor_of_a_state_gets_other_memory(
    name: str, move: Callable[[Tensor], None], device: torch.device, backend: str
) -> None:
    """It is followed; what lies at the old place is left alone."""
    twins = [new_param(device, 6000, dtype=torch.bfloat16) for _ in range(2)]
    twins[1].data.copy_(twins[0].data)
    options: dict[str, Any] = dict(lr=0.01, master_weights=True, master_weight_dtype="fp16", **FP8)
    optimizers = [FusedAdam([param], **options) for param in twins]
    for i in range(4):
        for param, optimizer in zip(twins, optimizers, strict=True):
            param.grad = torch.full_like(param, 1.0 + i)
            optimizer.step()
        if i == 1:
            move(optimizers[0].state[twins[0]][name])
            junk = [torch.full((6000,), 7.0, device=device) for _ in range(20)]
    assert all((one == 7.0).all() for one in junk)
    assert torch.equal(*twins)
    states = [optimizer.state[param] for optimizer, param in zip(optimizers, twins, strict=True)]
    for key, value in states[0].items():
        assert torch.equal(value.float(), states[1][key].float()), key


def test_states_in_one_buffer(device: torch.device, backend: str) -> None:
    params = [new_param(device, size) for size in (5, 0, 7)]
    optimizer = FusedAdam(params, lr=0.1)
    run(optimizer, params, steps=1)
    buffer, start = torch.zeros(100, device=device), 0
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][name] = buffer[start : start + param.numel()]
            start += param.numel()
    run(optimizer, params, steps=2)
    assert (buffer[: 2 * 12] != 0).all()
    assert (buffer[2 * 12 :] == 0).all()


class Logged(torch.Tensor):
    """A subclass with memory of its own."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, f: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return f(*args, **(kwargs or {}))


def test_gradients_of_a_subclass(device: torch.device, backend: str) -> None:
    params = [Parameter(torch.zeros(10, device=device)) for _ in range(2)]
    optimizer = FusedSGD(params, lr=1.0)
    for _ in range(2):
        ones(*params)
        grad = torch.ones(10, device=device)
        params[0].grad = torch.Tensor._make_subclass(Logged, grad)
        optimizer.step()
    assert all(torch.equal(param, torch.full_like(param, -2.0)) for param in params)


def test_gradients_without_memory_are_errors(device: torch.device, backend: str) -> None:
    param = Parameter(torch.zeros(10, device=device))
    optimizer = FusedSGD([param], lr=1.0)
    ones(param)
    optimizer.step()

    def differentiated(x: Tensor) -> Tensor:
        param.grad = x * 1
        optimizer.step()
        return x.sum()

    with pytest.raises((RuntimeError, TypeError)):
        torch.func.grad(differentiated)(torch.ones(10, device=device))
    assert torch.equal(param, torch.full_like(param, -1.0))


def test_copies_of_states(device: torch.device, backend: str) -> None:
    param = Parameter(torch.zeros(8, device=device))
    optimizer = FusedSGD([param], lr=1.0, momentum=0.5)
    ones(param)
    optimizer.step()
    state = optimizer.state
    copies = [
        pickle.loads(pickle.dumps(state[param])),
        copy.copy(state)[param],
        state.copy()[param],
        copy.deepcopy(dict(state[param])),
        next(iter(pickle.loads(pickle.dumps(state)).values())),
        (state | {})[param],
        ({} | state)[param],
    ]
    for one in copies:
        assert torch.equal(one["momentum_buffer"], state[param]["momentum_buffer"])
    optimizer.step()
    assert torch.equal(param, torch.full_like(param, -2.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_is_its_fp16_master(
    dtype: torch.dtype, device: torch.device, backend: str
) -> None:
    """A step of lr 0 leaves it; writing the master back, too."""
    param = new_param(device, 65536, dtype=dtype)
    options = dict(master_weights=True, master_weight_dtype=torch.float16)
    optimizer = FusedAdam([param], lr=1e-3, **options)  # type: ignore[arg-type]
    run(optimizer, [param])
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, [param], steps=1)
    assert torch.equal(param, before)
    master = optimizer.get_unscaled_state(param, "master_param")
    assert torch.equal(param, master.to(dtype))
    optimizer.set_scaled_state(param, "master_param", master)
    assert torch.equal(param, before)


def test_the_largest_weights_have_fp16_masters(device: torch.device, backend: str) -> None:
    for largest in (torch.finfo(torch.bfloat16).min, 2.0**127, 1e38):
        param = Parameter(torch.ones(5000, dtype=torch.bfloat16, device=device))
        param.data[3] = largest
        optimizer = FusedAdam([param], master_weights=True, master_weight_dtype=torch.float16)
        param.grad = torch.zeros_like(param)
        before = param.detach().clone()
        optimizer.step()
        assert param.isfinite().all()
        assert param[3] == before[3]
        assert torch.equal(param[256:], before[256:])


def test_a_pickle_from_before_limits_were_checked() -> None:
    optimizer = FusedAdam([Parameter(torch.zeros(4))], max_grad_norm=2.0)
    content = optimizer.__getstate__()
    content["max_grad_norm"] = content.pop("_max_grad_norm")
    again = FusedAdam([Parameter(torch.zeros(4))])
    again.__setstate__(content)
    assert again.max_grad_norm == 2.0


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf"), "x"])
def test_a_max_grad_norm_set_at_run_time_is_checked(value: Any) -> None:
    optimizer = FusedAdam([Parameter(torch.zeros(4))], max_grad_norm=2.0)
    with pytest.raises(ValueError, match="max_grad_norm must be"):
        optimizer.max_grad_norm = value
    assert optimizer.max_grad_norm == 2.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", "abc"),
        ("lr", None),
        ("lr", [0.1, 0.2]),
        ("betas", (0.9,)),
        ("betas", (0.9, 0.9, 0.9)),
        ("eps", None),
        ("maximize", [0.5, 0.5]),
    ],
)
def test_a_bad_value_of_a_later_group_changes_nothing(
    key: str, value: Any, device: torch.device, backend: str
) -> None:
    params = [Parameter(torch.zeros(4, device=device)) for _ in range(2)]
    optimizer = FusedAdam([dict(params=params[:1]), dict(params=params[1:])])
    run(optimizer, params)
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[1][key] = value
    with pytest.raises((ValueError, TypeError)):
        run(optimizer, params, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert optimizer.state[params[0]]["step"] == 3


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
        ("exp_avg", torch.ones(5000, device="meta"), "exp_avg of parameter 1 .* on meta"),
        ("exp_avg", torch.ones(5000).to_sparse(), "exp_avg of parameter 1 is torch.sparse_coo"),
        ("step", torch.tensor(-5.0), "step of parameter 1 is -5"),
        ("step", "abc", "step of parameter 1 must be one number, got 'abc'"),
        ("step", torch.ones(2), "step of parameter 1 must be one number"),
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


@pytest.mark.parametrize("steps", [0, 2])
def test_gradients_that_are_wrappers_are_errors(
    steps: int, device: torch.device, backend: str
) -> None:
    params = [Parameter(torch.zeros(4, device=device)) for _ in range(2)]
    optimizer = FusedSGD(params, lr=1.0)
    run(optimizer, params, steps)
    before = [param.detach().clone() for param in params]
    ones(*params)
    ordinary = torch.ones(4, device=device)
    params[1].grad = TwoTensor(ordinary, ordinary.clone())
    with pytest.raises(TypeError, match="parameter 1 of group 0 has a gradient of type TwoTensor"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_a_parameter_exchanged_within_its_group(device: torch.device, backend: str) -> None:
    params = [Parameter(torch.zeros(4, device=device)) for _ in range(3)]
    old, new = params[1], Parameter(torch.zeros(4, device=device))
    optimizer = FusedSGD(params, lr=1.0)
    ones(*params, new)
    optimizer.step()
    optimizer.param_groups[0]["params"][1] = new
    optimizer.step()
    found = [p.detach()[0].item() for p in (params[0], old, new, params[2])]
    assert found == [-2, -1, -1, -2]


def test_betas_set_at_run_time(device: torch.device, backend: str) -> None:
    """A list counts as well as a tuple, from the next step on."""
    params = [Parameter(torch.zeros(4, device=device)) for _ in range(2)]
    optimizers: list[torch.optim.Optimizer] = [
        FusedAdam([params[0]], lr=1.0),
        torch.optim.Adam([params[1]], lr=1.0),
    ]
    for scale in (1.0, -3.0):
        for optimizer, param in zip(optimizers, params, strict=True):
            param.grad = torch.full_like(param, scale)
            optimizer.step()
            optimizer.param_groups[0]["betas"] = [0.5, 0.9]
    torch.testing.assert_close(*(param.detach() for param in params))


def test_an_lr_of_two_numbers_is_an_error(device: torch.device, backend: str) -> None:
    param = Parameter(torch.zeros(4, device=device))
    optimizer = FusedAdam([param], lr=1.0)
    ones(param)
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = torch.ones(2, device=device)
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(max_grad_norm=1.0), dict(capturable=True)], ids=str)
def test_a_model_that_moves_between_devices(options: dict[str, Any], cuda: torch.device) -> None:
    """The norm follows it, and an lr that lies on the other device is found."""
    param = Parameter(torch.zeros(100))
    optimizer = FusedSGD([param], lr=1.0, **options)
    for device in (torch.device("cpu"), cuda, torch.device("cpu")):
        param.data = torch.zeros(100, device=device)
        param.grad = torch.full_like(param, 0.2)
        optimizer.step()
        clipped = optimizer.grad_norm is not None
        assert torch.allclose(param.cpu(), torch.full((100,), -0.1 if clipped else -0.2))
        assert optimizer.grad_norm is None or float(optimizer.grad_norm) == pytest.approx(2.0)


@pytest.mark.gpu
def test_a_model_on_two_devices(cuda: torch.device) -> None:
    """One norm, wherever the gradients are; an lr that is a tensor on one of the two."""
    here, there = Parameter(torch.zeros(100)), Parameter(torch.zeros(100, device=cuda))
    for lr in (1.0, torch.tensor(1.0), torch.tensor(1.0, device=cuda)):
        optimizer = FusedSGD([here, there], lr=lr, max_grad_norm=1.0)
        for grads in ((0.2, 0.2), (None, 0.2), (0.2, None), (None, None)):
            for param, value in zip((here, there), grads, strict=True):
                param.data.zero_()
                param.grad = None if value is None else torch.full_like(param, value)
            optimizer.step()
            norm = sum(100 * value**2 for value in grads if value) ** 0.5
            assert optimizer.grad_norm is None or float(optimizer.grad_norm) == pytest.approx(norm)
            for param, value in zip((here, there), grads, strict=True):
                want = -value / max(norm, 1) if value else 0.0
                torch.testing.assert_close(param.detach().cpu(), torch.full((100,), want))


def test_flushed_subnormal_numbers(native: str) -> None:
    """What is subnormal in a narrow dtype is not so in fp32."""
    param = Parameter(torch.zeros(300, dtype=torch.float16))
    param.grad = torch.full_like(param, 2.0**-20)
    optimizer = FusedSGD([param], lr=1.0, momentum=0.9)
    torch.set_flush_denormal(True)
    try:
        optimizer.step()
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(param, torch.full_like(param, -(2.0**-20)))


FP8_MODES: list[tuple[Any, dict[str, Any]]] = [
    (FusedAdam, dict(lr=0.02)),
    (FusedAdam, dict(lr=0.02, master_weight_dtype=torch.float16, **FP8)),
    (FusedAdam, dict(lr=0.02, weight_decay=0.1, adam_w_mode=False, max_grad_norm=1.0)),
    (FusedSGD, dict(lr=0.1, momentum=0.9, momentum_dtype="fp8")),
    (FusedLion, dict(lr=0.01, exp_avg_dtype="bf16")),
]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("kind", "options"), FP8_MODES)
def test_fp8_parameters(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, device: torch.device, backend: str
) -> None:
    """They are their master, rounded to nearest at their scale; the master goes as without them."""
    start = [torch.randn(shape, device=device) for shape in [(70, 70), (300,), (8193,)]]
    fp8 = [fp8_parameter(value, dtype) for value in start]
    wide = [Parameter(fp8_dequantize(param).bfloat16()) for param in fp8]
    options = dict(options, master_weights=True)
    ours = kind(fp8, use_decoupled_grad=True, **options)
    plain = kind(wide, **options)
    for param, twin in zip(fp8, wide, strict=True):  # from the same weights
        plain.set_scaled_state(twin, "master_param", fp8_dequantize(param))
        ours.set_scaled_state(param, "master_param", fp8_dequantize(param))
    for _ in range(4):
        for param, twin in zip(fp8, wide, strict=True):
            twin.grad = torch.randn_like(twin)
            param.decoupled_grad = twin.grad  # type: ignore[attr-defined]
        ours.step()
        plain.step()
    assert ours.backend == backend
    largest = torch.finfo(dtype).max
    for param, twin in zip(fp8, wide, strict=True):
        master = ours.get_unscaled_state(param, "master_param")
        torch.testing.assert_close(master, plain.get_unscaled_state(twin, "master_param"))
        scale = param.fp8_scale  # type: ignore[attr-defined]
        if "master_weight_dtype" not in options:  # or else the parameter was not rounded twice
            nearest = (master * scale).clamp(-largest, largest).to(dtype)
            assert torch.equal(param.float(), nearest.float())
        torch.testing.assert_close(param.fp8_amax, master.abs().max(), rtol=1e-3, atol=0)  # type: ignore[attr-defined]
        torch.testing.assert_close(param.fp8_scale_inv * scale, torch.ones_like(scale))  # type: ignore[attr-defined]


def test_fp8_parameters_resume(device: torch.device, backend: str) -> None:
    def steps(optimizer: Any, params: list[Parameter], count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            for param in params:
                grad = torch.randn(param.shape, generator=generator).to(device)
                param.decoupled_grad = grad  # type: ignore[attr-defined]
            optimizer.step()

    def new() -> tuple[list[Parameter], Any]:
        params = [fp8_parameter(torch.randn(5000, device=device)) for _ in range(2)]
        return params, FusedAdam(params, master_weights=True, use_decoupled_grad=True, **FP8)

    params, optimizer = new()
    steps(optimizer, params, 3, seed=1)
    saved = copy.deepcopy((params, optimizer.state_dict()))
    steps(optimizer, params, 3, seed=2)
    others, again = new()
    for other, kept in zip(others, saved[0], strict=True):
        other.data.copy_(kept.data)
        for name in ("fp8_scale", "fp8_amax", "fp8_scale_inv"):
            getattr(other, name).copy_(getattr(kept, name))
    again.load_state_dict(saved[1])
    steps(again, others, 3, seed=2)
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param.view(torch.uint8), other.view(torch.uint8))
        for name, value in optimizer.state[param].items():
            assert torch.equal(value.float(), again.state[other][name].float()), name


def test_fp8_parameters_need_a_master(device: torch.device, backend: str) -> None:
    with pytest.raises(ValueError, match="parameter 0 of group 0 is fp8 and needs master_weights"):
        FusedAdam([fp8_parameter(torch.randn(8, device=device))])


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
