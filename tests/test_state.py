"""Checkpoints: a run that was stopped and resumed is the run that was not; modes convert."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    ADAM_PRECISIONS,
    BF16,
    CASES,
    EVERY,
    F32,
    NARROW,
    PRECISIONS,
    ROWS,
    Case,
    all_params,
    assert_same_bits,
    bits,
    by_id,
    checked_step,
    decoded,
    flat,
    is_root,
    make,
    new_params,
    roots,
    scales,
    set_grads,
    snapshot,
    spacing,
    weight_of,
)
from torch import Tensor
from torch.nn import Parameter

import fusedopt

ADAM = CASES[0]
SHAPES = [(300,), (5000,), (), (0,), (65, 64)]


def cloned(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(param.detach().clone()) for param in params]


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    return [dict(params=params[:2]), dict(params=params[2:], lr=0.02)]


def step_alike(*optimizers: Any, steps: int = 2) -> None:
    """The same random gradients for all."""
    for _ in range(steps):
        lists = [all_params(optimizer) for optimizer in optimizers]
        set_grads(lists[0])
        for params in lists[1:]:
            for param, source in zip(params, lists[0], strict=True):
                # A copy of its own: torch's foreach SGD adds to the gradients.
                param.grad = None if source.grad is None else source.grad.to(param).clone()
        for optimizer in optimizers:
            optimizer.step()


def through_a_file(state_dict: Any, map_location: Any = None) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location=map_location)


def through_a_cpu_file(state_dict: Any) -> Any:
    return through_a_file(state_dict, "cpu")


Via = Callable[[Any], Any]


@pytest.mark.parametrize("via", [copy.deepcopy, through_a_file, through_a_cpu_file])
@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_resuming_is_going_on(
    case: Case, stepped_before: bool, via: Via, device: torch.device, backend: str
) -> None:
    """Also into an optimizer that has been used, whose plans point at other states."""
    params = new_params(case, device, SHAPES)
    optimizer = make(case, groups_of(params))
    step_alike(optimizer)
    copies = cloned(params)
    resumed = make(case, groups_of(copies))
    if stepped_before:
        step_alike(resumed, steps=1)
        for param, source in zip(copies, params, strict=True):
            param.data.copy_(source.data)
    resumed.load_state_dict(via(optimizer.state_dict()))
    assert_same_bits(snapshot(resumed), snapshot(optimizer))
    for param, source in zip(copies, params, strict=True):
        for name, value in optimizer.state[source].items():
            got = resumed.state[param][name]
            assert (got.dtype, got.shape, got.device) == (value.dtype, value.shape, value.device)
            assert got.stride() == value.stride()
    step_alike(optimizer, resumed)
    assert resumed.backend == backend
    assert_same_bits(snapshot(resumed), snapshot(optimizer))


@pytest.mark.parametrize(
    "case", by_id(CASES, "adam-capturable-lr-tensor", "adam-betas-tensor"), ids=str
)
def test_resuming_with_tensors_in_groups(case: Case, device: torch.device, backend: str) -> None:
    params = new_params(case, device, SHAPES)
    optimizer = make(case, params)
    step_alike(optimizer)
    copies = cloned(params)
    resumed = make(case, copies, lr=0.5, betas=(0.5, 0.5))
    resumed.load_state_dict(through_a_cpu_file(optimizer.state_dict()))
    step_alike(optimizer, resumed)
    assert resumed.backend == backend
    assert_same_bits(snapshot(resumed), snapshot(optimizer))


def test_parameters_without_state_stay_without(device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(300,), (5000,)])
    optimizer = make(ADAM, params)
    set_grads(params[:1])
    optimizer.step()
    copies = cloned(params)
    resumed = make(ADAM, copies)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert copies[1] not in resumed.state
    step_alike(optimizer, resumed)
    assert resumed.backend == backend
    assert [int(resumed.state[param]["step"]) for param in copies] == [3, 2]
    assert_same_bits(snapshot(resumed), snapshot(optimizer))


def test_a_checkpoint_of_nothing(device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(5000,)])
    optimizer = make(ADAM, params)
    optimizer.load_state_dict(through_a_file(make(ADAM, cloned(params)).state_dict()))
    assert not optimizer.state
    set_grads(params)
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


# ---- between modes ------------------------------------------------------------------------------


def assert_states_close(case: Case, got: Any, want: Any, where: str) -> None:
    """Each state as near as the grids of both modes allow."""
    for name in case.state_names:
        a, b = decoded(got, name), decoded(want, name)
        if a.numel() == 0:
            continue
        if is_root(got, name) or is_root(want, name):
            a, b = a.sqrt(), b.sqrt()
        scale = scales(got, name)
        slack = spacing(torch.maximum(a.abs(), b.abs()) / scale, got[name].dtype) * scale
        assert ((a - b).abs() <= slack * (1 + 1e-6) + 4 * spacing(b)).all(), (where, name)
        if name.endswith("_sq"):
            assert (a[b > 0] > 0).all(), (where, name)


CONVERSIONS = [
    ("adam-default", "adam-fp8-fp8"),
    ("adam-fp8-fp8", "adam-default"),
    ("adam-fp16-fp16", "adam-e5m2-e5m2"),
    ("adam-bf16-bf16", "adam-fp16-fp16"),
    ("adam-fp8-fp8", "adam-bf16-bf16"),
    ("adam-master", "adam-remainder"),
    ("adam-remainder", "adam-master"),
    ("adam-master", "adam-fp16-master"),
    ("adam-fp16-master", "adam-master"),
    ("adam-master", "adam-24-bit"),
    ("adam-24-bit", "adam-remainder"),
    ("adam-24-bit", "adam-master"),
    ("adam-remainder-fp8", "adam-24-bit-fp8"),
    ("adam-remainder-fp8", "adam-fp16-master-fp8"),
    ("adam-master", "adam-bf16-param"),
    ("adam-bf16-param", "adam-master"),
    ("adam-bf16-param", "adam-remainder-fp8"),
    ("adam-decay-amsgrad", "adam-amsgrad-fp8"),
    ("adam-amsgrad-fp16", "adam-decay-amsgrad"),
]
# What is left of a master's precision, in steps of bf16.
MASTER_GRID = {"adam-fp16-master": 2.0**-3, "adam-fp16-master-fp8": 2.0**-3}
MASTER_GRID |= {"adam-24-bit": 2.0**-8, "adam-24-bit-fp8": 2.0**-8, "adam-bf16-param": 1.0}


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_modes_convert(source: str, target: str, device: torch.device, backend: str) -> None:
    old_case, new_case = by_id(EVERY, source, target)
    params = new_params(old_case, device, [(300,), (5000,), (0,)])
    optimizer = make(old_case, params)
    step_alike(optimizer, steps=3)
    copies = cloned(params)
    converted = make(new_case, copies)
    converted.load_state_dict(keep_options(converted, optimizer.state_dict()))
    for param, source_param in zip(copies, params, strict=True):
        got, want = converted.state[param], optimizer.state[source_param]
        where = f"{source} to {target}, {tuple(param.shape)}"
        assert got["step"] == want["step"]
        assert_states_close(new_case, got, want, where)
        if param.numel():
            a, b = weight_of(param, got), weight_of(source_param, want)
            slack = MASTER_GRID.get(target, 0.0) * spacing(b, BF16)
            if target.startswith("adam-fp16-master") and param.numel() >= 4096:
                scale = scales(got, "master_param")
                slack = spacing(b / scale, torch.float16) * scale
            if source.startswith("adam-fp16-master"):
                slack = slack + 0.5 * spacing(b)  # fp32 holds code times scale only nearly
            assert ((a - b).abs() <= slack).all(), where
    fresh = make(new_case, cloned(params))
    fresh.init_state()
    for param, other in zip(copies, all_params(fresh), strict=True):
        expected = {key: value.dtype for key, value in fresh.state[other].items()}
        assert {key: value.dtype for key, value in converted.state[param].items()} == expected
    for _ in range(2):
        set_grads(copies)
        checked_step(new_case, converted)
    assert converted.backend == backend


def keep_options(optimizer: Any, state_dict: Any) -> Any:
    """A file of another mode whose groups say the mode of this optimizer."""
    groups = [
        dict(mine, params=theirs["params"])
        for mine, theirs in zip(
            optimizer.state_dict()["param_groups"], state_dict["param_groups"], strict=True
        )
    ]
    return copy.deepcopy(dict(state_dict, param_groups=groups))


MODES = (
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "master_weights",
    "master_weight_dtype",
    "master_weight_bits",
    "store_param_remainders",
)


@pytest.mark.parametrize("target", ["adam-fp8-fp8", "adam-bf16-bf16"])
def test_the_mode_is_the_run_s_not_the_file_s(
    target: str, device: torch.device, backend: str
) -> None:
    """An fp32 file loaded as it is into an fp8 run; lr comes from the file as in torch."""
    (case,) = by_id(PRECISIONS, target)
    params = new_params(ADAM, device, [(5000,)])
    optimizer = make(ADAM, params, lr=0.25)
    step_alike(optimizer)
    copies = cloned(params)
    converted = make(case, copies, lr=0.125)
    before = {key: converted.param_groups[0][key] for key in MODES}
    converted.load_state_dict(through_a_file(optimizer.state_dict()))
    assert {key: converted.param_groups[0][key] for key in MODES} == before
    assert converted.param_groups[0]["lr"] == 0.25
    assert_states_close(case, converted.state[copies[0]], optimizer.state[params[0]], target)
    set_grads(copies)
    checked_step(case, converted)
    assert converted.backend == backend


# ---- torch.optim's files ------------------------------------------------------------------------


# A row, the options that are not the row's, and torch's.
TORCH_FILES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = [
    ("adam-default", torch.optim.AdamW, dict(), dict()),
    ("adam-default", torch.optim.AdamW, dict(), dict(fused=True)),
    ("adam-default", torch.optim.AdamW, dict(), dict(foreach=True)),
    ("adam-default", torch.optim.AdamW, dict(amsgrad=True), dict(amsgrad=True)),
    ("adam-default", torch.optim.Adam, dict(adam_w_mode=False), dict(weight_decay=0.1)),
    ("adam-default", torch.optim.Adam, dict(adam_w_mode=False), dict(maximize=True)),
    ("sgd-default", torch.optim.SGD, dict(), dict(weight_decay=0.1)),
    ("sgd-momentum", torch.optim.SGD, dict(), dict(momentum=0.9, dampening=0.5)),
    ("sgd-momentum", torch.optim.SGD, dict(), dict(momentum=0.8, nesterov=True)),
    ("sgd-momentum", torch.optim.SGD, dict(), dict(momentum=0.9, fused=True)),
]


@pytest.mark.parametrize(("row", "kind", "ours", "theirs"), TORCH_FILES)
@pytest.mark.parametrize("old_steps", [False, True])
def test_torch_checkpoints_load(
    row: str,
    kind: Any,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    old_steps: bool,
    device: torch.device,
    backend: str,
) -> None:
    """Training goes on as torch's would; files of old versions have steps that are numbers."""
    (case,) = by_id(CASES, row)
    params = new_params(case, device, SHAPES)
    reference = kind(groups_of(params), lr=0.01, **theirs)
    step_alike(reference, steps=3)
    file = through_a_file(reference.state_dict())
    for state in file["state"].values():
        if old_steps and "step" in state:
            state["step"] = int(state["step"])
    copies = cloned(params)
    optimizer = make(case, groups_of(copies), **ours)
    optimizer.load_state_dict(file)
    assert optimizer.param_groups[0]["weight_decay"] == reference.param_groups[0]["weight_decay"]
    step_alike(reference, optimizer, steps=3)
    assert optimizer.backend == backend
    assert_goes_on_alike(reference, optimizer)


def assert_goes_on_alike(reference: Any, optimizer: Any) -> None:
    pairs = zip(all_params(reference), all_params(optimizer), strict=True)
    for theirs, ours in pairs:
        # Steps of 0.02 on weights near 1: what is near 0 now has rounded as numbers near 1 do.
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=5e-7)
        wanted = {key: value for key, value in reference.state[theirs].items() if value is not None}
        assert wanted.keys() | {"step"} == optimizer.state[ours].keys() | {"step"}
        for name, value in wanted.items():
            got = optimizer.state[ours][name]
            torch.testing.assert_close(got.to(value), value, rtol=2e-6, atol=1e-7)


@pytest.mark.gpu
def test_a_capturable_torch_checkpoint_loads() -> None:
    device = torch.device("cuda")
    params = new_params(ADAM, device, SHAPES)
    reference = torch.optim.AdamW(groups_of(params), lr=torch.tensor(0.01), capturable=True)
    step_alike(reference, steps=3)
    optimizer = make(ADAM, groups_of(cloned(params)), capturable=True)
    optimizer.load_state_dict(through_a_cpu_file(reference.state_dict()))
    step_alike(reference, optimizer, steps=3)
    assert_goes_on_alike(reference, optimizer)


@pytest.mark.parametrize("case", ADAM_PRECISIONS, ids=str)
def test_a_torch_checkpoint_loads_in_every_mode(
    case: Case, device: torch.device, backend: str
) -> None:
    params = new_params(case, device, [(300,), (5000,)])
    amsgrad = bool(case.kwargs.get("amsgrad"))
    reference = torch.optim.AdamW(params, lr=0.01, amsgrad=amsgrad, eps=1e-3)  # fp16 has no 1e-8
    step_alike(reference, steps=2)
    copies = cloned(params)
    optimizer = make(case, copies)
    optimizer.load_state_dict(through_a_file(reference.state_dict()))
    for param, source in zip(copies, params, strict=True):
        assert_states_close(case, optimizer.state[param], reference.state[source], case.id)
        narrow = optimizer.state[param]["exp_avg"].dtype == BF16
        assert narrow == (param.numel() >= 4096 and case.kwargs["exp_avg_dtype"] == "bf16")
    set_grads(copies)
    checked_step(case, optimizer)
    assert optimizer.backend == backend


@pytest.mark.parametrize("case", [*NARROW, *ADAM_PRECISIONS], ids=str)
def test_torch_checkpoints_are_written(case: Case, device: torch.device, backend: str) -> None:
    params = new_params(case, device, SHAPES)
    optimizer = make(case, groups_of(params))
    step_alike(optimizer, steps=3)
    before = snapshot(optimizer)
    file = through_a_file(optimizer.to_torch_state_dict())
    assert_same_bits(snapshot(optimizer), before)
    for i, param in enumerate(params):
        saved, state = file["state"][i], optimizer.state[param]
        assert set(saved) == {"step", *case.state_names}
        assert saved["step"] == state["step"]
        for name in case.state_names:
            assert saved[name].dtype == F32
            assert saved[name].shape == param.shape
            got = flat(saved[name]).double()
            torch.testing.assert_close(got, decoded(state, name), rtol=2e-7, atol=0)
    copies = cloned(params)
    reference = torch.optim.AdamW(groups_of(copies), amsgrad="max_exp_avg_sq" in case.state_names)
    known = set(reference.param_groups[0])
    reference.load_state_dict(file)
    assert set(reference.param_groups[0]) == known
    set_grads(copies)
    reference.step()
    assert optimizer.backend == backend


@pytest.mark.parametrize(
    "case",
    by_id(CASES, "adam-decay", "adam-l2", "adam-l2-amsgrad", "adam-decay-maximize")
    + by_id(CASES, "sgd-default", "sgd-dampening", "sgd-nesterov", "sgd-maximize"),
    ids=str,
)
def test_torch_goes_on_from_our_checkpoint(case: Case, device: torch.device, backend: str) -> None:
    params = new_params(case, device, SHAPES)
    optimizer = make(case, groups_of(params))
    step_alike(optimizer, steps=3)
    kind: Any = case.reference
    reference = kind(groups_of(cloned(params)))
    reference.load_state_dict(through_a_file(optimizer.to_torch_state_dict()))
    step_alike(optimizer, reference, steps=3)
    assert optimizer.backend == backend
    assert_goes_on_alike(reference, optimizer)


# ---- groups, files with less or with other content ----------------------------------------------


def test_a_missing_key_is_the_constructor_s(device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(300,), (5000,)])
    optimizer = make(ADAM, params, lr=0.5)
    step_alike(optimizer)
    file = through_a_file(optimizer.state_dict())
    for group in file["param_groups"]:
        for key in set(group) - {"params", "lr"}:
            del group[key]
    copies = cloned(params)
    resumed = make(ADAM, [dict(params=copies, eps=1e-3)], betas=(0.5, 0.6), weight_decay=0.25)
    resumed.load_state_dict(file)
    (group,) = resumed.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.5, 0.6), 0.25)
    set_grads(copies)
    checked_step(ADAM, resumed)
    assert resumed.backend == backend


def one_group_more(file: Any) -> None:
    file["param_groups"].append(dict(file["param_groups"][0], params=[9]))


def one_parameter_less(file: Any) -> None:
    file["param_groups"][1]["params"].pop()


def another_shape(file: Any) -> None:
    file["state"][1]["exp_avg"] = torch.zeros(4999)


def another_shape_later(file: Any) -> None:
    file["state"][4]["exp_avg_sq"] = torch.zeros(64, 65)


MISMATCHES = [
    (one_group_more, r"(?s)(3 .*groups?.*2|2 .*groups?.*3)"),
    (one_parameter_less, r"group 1"),
    (another_shape, r"(?s)exp_avg.*(4999.*5000|5000.*4999)"),
    (another_shape_later, r"(?s)exp_avg_sq.*(64, 65.*65, 64|65, 64.*64, 65)"),
]


@pytest.mark.parametrize(("spoil", "message"), MISMATCHES)
def test_a_file_that_does_not_fit(
    spoil: Callable[[Any], None], message: str, device: torch.device, backend: str
) -> None:
    params = new_params(ADAM, device, SHAPES)
    optimizer = make(ADAM, groups_of(params))
    step_alike(optimizer)
    file = through_a_file(optimizer.state_dict())
    file["param_groups"][0]["lr"] = 77.0
    for state in file["state"].values():
        state["step"] += 1
    spoil(file)
    before, groups = snapshot(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(file)
    assert optimizer.state_dict()["param_groups"] == groups
    assert_same_bits(snapshot(optimizer), before)
    set_grads(params)
    checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


def test_loading_does_not_change_the_file(device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(300,), (5000,)])
    optimizer = make(ADAM, params)
    step_alike(optimizer)
    file = through_a_file(optimizer.state_dict())
    untouched = copy.deepcopy(file)
    copies = cloned(params)
    (case,) = by_id(PRECISIONS, "adam-fp8-fp8")
    for row in (ADAM, case):
        resumed = make(row, copies)
        resumed.load_state_dict(file)
        step_alike(resumed)
        assert resumed.backend == backend
    assert file["param_groups"] == untouched["param_groups"]
    for i, state in untouched["state"].items():
        assert_same_bits(
            [bits(t) for t in file["state"][i].values()], [bits(t) for t in state.values()]
        )


@pytest.mark.parametrize("capturable", [False, True])
def test_a_later_group_starts_at_step_1(
    capturable: bool, device: torch.device, backend: str
) -> None:
    params = new_params(ADAM, device, SHAPES)
    optimizer = make(ADAM, params[:3], capturable=capturable)
    step_alike(optimizer, steps=2)
    optimizer.add_param_group(dict(params=params[3:], lr=0.05))
    for _ in range(2):
        set_grads(params)
        checked_step(ADAM, optimizer)
    assert optimizer.backend == backend
    assert [int(optimizer.state[param]["step"]) for param in params] == [4, 4, 4, 2, 2]


def copied(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer)


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("duplicate", [copied, pickled])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_copies_step_alike(
    case: Case,
    steps_before: int,
    duplicate: Callable[[Any], Any],
    device: torch.device,
    backend: str,
) -> None:
    optimizer = make(case, groups_of(new_params(case, device, SHAPES)), seed=5)
    step_alike(optimizer, steps=steps_before)
    twin = duplicate(optimizer)
    assert all(a is not b for a, b in zip(all_params(twin), all_params(optimizer), strict=True))
    step_alike(optimizer, twin)
    assert twin.backend == backend
    assert_same_bits(snapshot(twin), snapshot(optimizer))


@pytest.mark.parametrize("capturable", [False, True])
def test_a_scheduler_over_two_groups_with_a_tensor_lr(
    capturable: bool, device: torch.device, backend: str
) -> None:
    """Each group owns its lr, though the constructor was given one tensor."""
    params = new_params(ADAM, device, [(300,), (5000,)])
    given = torch.tensor(0.1)
    optimizer = make(
        ADAM, [dict(params=params[:1]), dict(params=params[1:])], lr=given, capturable=capturable
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.5**step, lambda step: 0.1**step]
    )
    for step in range(3):
        got = [float(group["lr"]) for group in optimizer.param_groups]
        assert got == pytest.approx([0.1 * 0.5**step, 0.1 * 0.1**step], rel=1e-6)
        set_grads(params)
        checked_step(ADAM, optimizer)
        scheduler.step()
    assert optimizer.backend == backend
    assert optimizer.param_groups[0]["lr"] is not optimizer.param_groups[1]["lr"]


@pytest.mark.parametrize("capturable", [False, True])
def test_a_float_lr_at_any_time(capturable: bool, device: torch.device, backend: str) -> None:
    params = new_params(ADAM, device, [(300,), (5000,)])
    optimizer = make(ADAM, params, lr=torch.tensor(0.1), capturable=capturable)
    for lr in (0.1, 0.01, 0.0, 0.3):
        optimizer.param_groups[0]["lr"] = lr
        set_grads(params)
        checked_step(ADAM, optimizer)
    assert optimizer.backend == backend


# ---- TransformerEngine's names ------------------------------------------------------------------


@pytest.mark.parametrize("case", PRECISIONS, ids=str)
def test_states_are_read_and_written(case: Case, device: torch.device, backend: str) -> None:
    (param,) = new_params(case, device, [(80, 64)])
    optimizer = make(case, [param])
    set_grads([param])
    optimizer.step()
    assert optimizer.backend == backend
    state = optimizer.state[param]
    for name in case.state_names:
        value = optimizer.get_unscaled_state(param, name)
        assert (value.dtype, value.shape, value.device) == (F32, param.shape, param.device)
        torch.testing.assert_close(flat(value).double(), decoded(state, name), rtol=2e-7, atol=0)
        before = bits(state[name]).clone()
        optimizer.set_scaled_state(param, name, value)
        assert torch.equal(bits(state[name]), before)
        new = torch.rand(param.shape, device=device)
        dtype = state[name].dtype
        optimizer.set_scaled_state(param, name, new)
        assert state[name].dtype == dtype
        want = flat(new).double()
        got = roots(state, name)
        want = want.sqrt() if is_root(state, name) else want
        scale = scales(state, name)
        slack = spacing(torch.maximum(got, want) / scale, dtype) * scale + spacing(want)
        assert ((got - want).abs() <= slack).all()
    checked_step(case, optimizer)
    wrong: Tensor = torch.zeros(3, device=device)
    with pytest.raises((ValueError, RuntimeError), match="80"):
        optimizer.set_scaled_state(param, case.state_names[0], wrong)
    no_numbers: Any = ([0.0], torch.zeros_like(param, dtype=torch.complex64))
    for value in no_numbers:
        with pytest.raises(ValueError, match="must be a tensor of real numbers, got"):
            optimizer.set_scaled_state(param, case.state_names[0], value)


def test_one_parameter_s_state_is_made(device: torch.device, backend: str) -> None:
    (case,) = by_id(NARROW, "adam-bf16-param")
    params = new_params(case, device, [(5000,), (5000,)])
    optimizer = make(case, params, store_param_remainders=True)
    optimizer.initialize_state(params[0])
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    assert optimizer.state[params[0]]["master_param"].dtype == torch.int16
    assert params[1] not in optimizer.state
    set_grads(params)
    checked_step(case, optimizer)
    assert optimizer.backend == backend


@pytest.mark.parametrize(
    ("saved", "fused"),
    [
        (torch.optim.SGD, fusedopt.FusedAdam),
        (torch.optim.RMSprop, fusedopt.FusedAdam),
        (torch.optim.Adam, fusedopt.FusedSGD),
        (torch.optim.Adam, fusedopt.FusedLion),
        (partial(torch.optim.SGD, momentum=0.9), fusedopt.FusedAdam),
        (fusedopt.FusedLion, fusedopt.FusedAdam),
        (fusedopt.FusedLion, fusedopt.FusedSGD),
        (fusedopt.FusedSGD, fusedopt.FusedLion),
    ],
)
def test_a_file_of_another_optimizer(saved: Any, fused: Any) -> None:
    param = Parameter(torch.ones(5))
    param.grad = torch.ones(5)
    other = saved([param], lr=0.5)
    other.step()
    optimizer = fused([param], lr=0.25)
    optimizer.step()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="the checkpoint is of another optimizer: "):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="no optimizer's state_dict: it has no param_groups"):
        optimizer.load_state_dict({})
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert_same_bits(snapshot(optimizer), before)


def test_a_file_that_is_damaged(device: torch.device, backend: str) -> None:
    """One error that names what is wrong, and nothing has changed."""
    params = [Parameter(torch.randn(5000, device=device))]
    params.append(fusedopt.fp8_parameter(torch.randn(8, device=device)))
    kept: Any = dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8", use_decoupled_grad=True)
    optimizer = fusedopt.FusedAdam(params, master_weights=True, **kept)
    for param in params:
        param.decoupled_grad = torch.randn(param.shape, device=device)  # type: ignore[attr-defined]
    optimizer.step()
    assert optimizer.backend == backend
    before = snapshot(optimizer)
    nothing = torch.zeros(20)
    for key, name, value, said in (
        (0, "exp_avg_sq", None, "of another optimizer: parameter 0 has no exp_avg_sq"),
        (
            0,
            "exp_avg_sq_scale",
            None,
            "is torch.float8_e4m3fn in the checkpoint, but it has no exp_avg_sq_scale",
        ),
        (0, "exp_avg_scale", nothing, "exp_avg_scale of parameter 0 has 0.0"),
        (0, "exp_avg_scale", nothing - 1, "exp_avg_scale of parameter 0 has -1.0"),
        (0, "exp_avg_scale", nothing / 0, "exp_avg_scale of parameter 0 has nan"),
        (0, "step", torch.tensor(-1.0), "step of parameter 0 is"),
        (1, "fp8_scale", "1", "fp8_scale of parameter 1 must be one number, got '1'"),
        (1, "fp8_amax", torch.ones(2), "fp8_amax of parameter 1 must be one number"),
        (1, "fp8_scale", torch.tensor(torch.nan), "fp8_scale of parameter 1 is"),
    ):
        file = copy.deepcopy(optimizer.state_dict())
        file["state"][0]["master_param"] = torch.full((5000,), 7.0)
        file["state"][key][name] = value
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(file)
        assert_same_bits(snapshot(optimizer), before)
    file = copy.deepcopy(optimizer.state_dict())
    file["state"][1]["fp8_scale"] = file["state"][1]["fp8_scale"].reshape(1)
    optimizer.load_state_dict(file)
    assert_same_bits(snapshot(optimizer), before)


def test_nan_leaves_the_others_remainders(device: torch.device, backend: str) -> None:
    param = Parameter(torch.randn(5000, device=device).bfloat16())
    optimizer = fusedopt.FusedAdam([param], store_param_remainders=True)
    param.grad = torch.randn_like(param)
    optimizer.step()
    assert optimizer.backend == backend
    param.data[7] = torch.nan
    wide = Parameter(param.detach().float())
    fusedopt.FusedAdam([wide]).load_state_dict(optimizer.state_dict())
    master = optimizer.get_unscaled_state(param, "master_param")
    assert torch.equal((wide != master).nonzero().flatten().cpu(), torch.tensor([7]))


@pytest.mark.parametrize(
    "kept",
    [
        dict(store_param_remainders=True),
        dict(master_weights=True),
        dict(master_weight_bits=24),
        dict(master_weights=True, master_weight_dtype=torch.float16),
    ],
    ids=str,
)
def test_fp32_parameters_become_the_master(
    kept: dict[str, Any], device: torch.device, backend: str
) -> None:
    """A model of bf16 weights goes on in fp32 without losing what its optimizer kept."""
    param = Parameter(torch.randn(5000, device=device).bfloat16())
    optimizer = fusedopt.FusedAdam([param], **kept)
    for _ in range(2):
        param.grad = torch.randn_like(param)
        optimizer.step()
    assert optimizer.backend == backend
    master = optimizer.get_unscaled_state(param, "master_param")
    wide = Parameter(param.detach().float())
    twin = fusedopt.FusedAdam([wide])
    twin.load_state_dict(optimizer.state_dict())
    assert torch.equal(wide.detach(), master)
    assert "master_param" not in twin.state[wide]
