"""Narrow states and masters: what is stored, how it is rounded, and from which random bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import (
    ADAM_PRECISIONS,
    BF16,
    EVERY,
    F32,
    PRECISIONS,
    Case,
    assert_same_bits,
    bits,
    by_id,
    checked_step,
    decoded,
    flat,
    is_root,
    lion,
    make,
    new_params,
    roots,
    scales,
    set_grads,
    snapshot,
    spacing,
    step_of,
    weight_of,
)
from torch import Tensor
from torch.nn import Parameter

import fusedopt
from fusedopt import FusedAdam, FusedSGD

STATES = [case for case in ADAM_PRECISIONS if case.dtype == F32]
MASTERS = [case for case in PRECISIONS if case.dtype != F32]
SPLIT = by_id(PRECISIONS, "adam-remainder", "adam-24-bit")
TOP = {torch.float16: 14, torch.float8_e4m3fn: 8, torch.float8_e5m2: 14}  # exponent of the largest
SIZE = 4096 + 300  # with a block that is not whole
NO_MOMENTUM = dict(betas=(0.0, 0.0), lr=0.0, weight_decay=0.0)  # the states become g and g * g


def scaled_names(case: Case, state: Any) -> list[str]:
    return [name for name in (*case.state_names, "master_param") if f"{name}_scale" in state]


def wide(size: int = SIZE, octaves: float = 12) -> Tensor:
    """Positive numbers over many orders of magnitude, inside each block too."""
    return torch.exp2(-octaves * torch.rand(size))


# ---- what is stored -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ADAM_PRECISIONS, ids=str)
def test_the_asked_dtypes_are_stored(case: Case, device: torch.device, backend: str) -> None:
    """Of tensors under 4096 elements fp32, whatever was asked; a scale per block of 256."""
    params = new_params(case, device, [(SIZE,), (4095,), (0,)])
    optimizer = make(case, params)
    optimizer.init_state()
    assert optimizer.backend == backend
    named: dict[Any, torch.dtype] = dict(bf16=BF16, fp16=torch.float16, fp8=torch.float8_e4m3fn)
    named |= {"fp32": F32, "fp8_e5m2": torch.float8_e5m2}
    named |= {None: F32, torch.uint8: torch.float8_e4m3fn}
    for param in params:
        state = optimizer.state[param]
        small = param.numel() < 4096
        for name in case.state_names:
            asked = case.kwargs["exp_avg_dtype" if name == "exp_avg" else "exp_avg_sq_dtype"]
            want = named.get(asked, asked)
            assert state[name].dtype == (F32 if small else want), name
            assert state[name].shape == param.shape
            assert (f"{name}_scale" in state) == (not small and want in TOP), name
        for name in scaled_names(case, state):
            assert state[f"{name}_scale"].shape == (18,)
            assert state[f"{name}_scale"].dtype == F32
        assert state["step"].shape == ()
        assert state["step"].dtype == F32
        assert ("master_param" in state) == (
            case in MASTERS and not case.kwargs.get("stochastic_rounding", False)
        )
        if "master_param" in state:
            exact = state["master_param"].dtype != torch.float16
            error = (weight_of(param, state) - flat(param).double()).abs()
            bound = 0 if exact else spacing(flat(param).double(), torch.float16).max().item() * 8
            assert param.numel() == 0 or error.max() <= bound


def test_fp32_parameters_get_no_master(device: torch.device, backend: str) -> None:
    for options in (
        dict(master_weights=True),
        dict(store_param_remainders=True),
        dict(master_weight_bits=24),
    ):
        params = new_params(EVERY[0], device, [(SIZE,)])
        optimizer = make(EVERY[0], params, **options)
        optimizer.init_state()
        assert optimizer.backend == backend
        assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("case", "bytes_per_element"),
    [
        (by_id(PRECISIONS, "adam-fp8-fp8")[0], 2.04),
        (by_id(PRECISIONS, "adam-remainder-fp8")[0], 4.04),
        (by_id(PRECISIONS, "adam-24-bit-fp8")[0], 3.04),
    ],
    ids=str,
)
def test_state_bytes(
    case: Case, bytes_per_element: float, device: torch.device, backend: str
) -> None:
    params = new_params(case, device, [(1 << 16,)])
    optimizer = make(case, params)
    optimizer.init_state()
    assert optimizer.backend == backend
    total = sum(t.numel() * t.element_size() for t in optimizer.state[params[0]].values())
    assert total <= bytes_per_element * (1 << 16)


@pytest.mark.parametrize("case", STATES, ids=str)
def test_blocks(case: Case, device: torch.device, backend: str) -> None:
    """The largest of a block is exact, a block of zeros has scale 1, no second moment is zero."""
    grad = wide(octaves=40).to(device) * torch.where(torch.rand(SIZE) < 0.5, 1, -1).to(device)
    grad[512:768] = 0
    grad[100] = 0
    param = Parameter(torch.zeros(SIZE, device=device))
    optimizer = make(case, [param], **NO_MOMENTUM)
    param.grad = grad
    optimizer.step()
    assert optimizer.backend == backend
    state = optimizer.state[param]
    for name in case.state_names:
        got, want = decoded(state, name), grad.double()
        want = want if name == "exp_avg" else (grad * grad).double()
        assert torch.equal(got[want == 0], want[want == 0]), name
        if name != "exp_avg":
            # Also squares that fp32 holds only as subnormal numbers.
            assert (got[want != 0] > 0).all(), name
    for name in scaled_names(case, state):
        scale = state[f"{name}_scale"]
        assert scale[2] == 1
        got, want = roots(state, name), grad.double()
        if is_root(state, name):
            want = want.abs()
        for i in range(0, SIZE, 256):
            block = want[i : i + 256]
            largest = int(block.abs().argmax())
            error = (got[i + largest] - block[largest]).abs()
            code = flat(state[name])[i + largest].float().abs()
            top = 2.0 ** TOP[state[name].dtype]
            if forgets(name):
                # The root of a square is the number again only to an ulp.
                assert error <= (spacing(block[largest]) if is_root(state, name) else 0), (name, i)
                assert code == (0 if i == 512 else top)
            elif i != 512:
                assert torch.equal(scale.log2(), scale.log2().round())
                step = step_of(code.double(), state, name) * scale[i // 256]
                assert error <= step * 0.51, (name, i)
                assert top / 2 <= code < top


@pytest.mark.parametrize("case", ADAM_PRECISIONS, ids=str)
def test_decode_then_encode_is_the_identity(case: Case, device: torch.device, backend: str) -> None:
    """A step whose arithmetic changes nothing leaves every bit alone, whatever the random bits.

    The betas round to 1 in fp32, the gradient is zero and so is lr.
    """
    size = 1 << 14
    (param,) = new_params(case, device, [(size,)])
    still = 1 - 1e-9
    optimizer = make(case, [param], lr=0.0, weight_decay=0.0, betas=(still, still))
    optimizer.init_state()
    state = optimizer.state[param]
    for name in scaled_names(case, state):
        fill_with_codes(state[name], state[f"{name}_scale"], name.endswith("_sq"), forgets(name))
    for name in case.state_names:
        if name not in scaled_names(case, state):
            state[name].copy_(torch.rand(size))
    if "max_exp_avg_sq" in state:  # so that the maximum is not replaced
        state["exp_avg_sq"].zero_()
    if f"{case.state_names[1]}_scale" in state and "max_exp_avg_sq" in state:
        state["exp_avg_sq_scale"].fill_(1)
    if "master_param" in state and state["master_param"].dtype == F32:
        state["master_param"].copy_(torch.randn(size))
        param.data.copy_(state["master_param"])
    elif "master_param" in state and state["master_param"].dtype == torch.float16:
        param.data.copy_(weight_of(param, state).float())
    elif "master_param" in state:
        values = finite_patterns(size, device)  # of which none may become -0
        values = values.where(values.abs() > 1e-30, 1.0)
        half, remainder = canonical_split(values, state["master_param"])
        param.data.copy_(half)
        state["master_param"].copy_(remainder)
    param.grad = torch.zeros_like(param)
    before = snapshot(optimizer)
    for _ in range(4):
        state["step"].fill_(float(torch.randint(1000, ())))
        optimizer.step()
        state["step"].zero_()
        assert_same_bits(snapshot(optimizer), before)
    assert optimizer.backend == backend


def forgets(name: str) -> bool:
    """Or else a block's scale is a power of two."""
    return name not in ("max_exp_avg_sq", "master_param")


def fill_with_codes(raw: Tensor, scale: Tensor, positive: bool, forgets: bool) -> None:
    """Blocks as an encoder leaves them: any codes, of which the largest is the top one."""
    top = 2.0 ** TOP[raw.dtype] * (1 if forgets else 0.75)
    width = raw.element_size()
    codes = torch.arange(1 << 8 * width).to({1: torch.uint8, 2: torch.int32}[width])
    values = (codes if width == 1 else codes.to(torch.int16)).view(raw.dtype).float()
    values = values[values.isfinite() & (values.abs() <= top)]
    if positive and width == 1:  # the sign bit is one of the mantissa
        values = values[~values.signbit() | (values.abs() < top)]
    elif positive:
        values = values[~values.signbit()]
    else:
        values = values[~(values.signbit() & (values == 0))]  # a step makes 0 of -0
    chosen = values[torch.randint(len(values), (raw.numel() // 256, 256))]
    chosen[:, 7] = top
    raw.copy_(chosen.flatten().to(raw.device))
    exponents = torch.empty(scale.shape).uniform_(-30, 10)
    scale.copy_(torch.exp2(exponents if forgets else exponents.round()))


@pytest.mark.parametrize("case", STATES, ids=str)
def test_rounding_is_unbiased(case: Case, device: torch.device, backend: str) -> None:
    """Mean error within 5 standard errors, in normal and in subnormal codes; the maximum is not."""
    size = 1 << 18
    grad = wide(size).to(device)
    grad[::256] = 1.5
    param = Parameter(torch.zeros(size, device=device))
    optimizer = make(case, [param], **NO_MOMENTUM)
    param.grad = grad
    optimizer.step()
    assert optimizer.backend == backend
    state = optimizer.state[param]
    for name in case.state_names[:2]:
        if state[name].dtype == F32:
            continue
        got = roots(state, name)
        want = grad.double()
        if name == "exp_avg_sq" and not is_root(state, name):
            want = (grad * grad).double()
        scale = scales(state, name)
        unit = step_of(want / scale, state, name) * scale
        # Second moments below the smallest code are raised to it, and there is nothing left over.
        counted = (want > unit) & (got != want)
        error = ((got - want) / unit)[counted]
        assert len(error) > size // 2
        assert error.abs().max() <= 1 + 2.0**-10
        assert error.mean().abs() <= 5 * error.std() / len(error) ** 0.5, name
        assert error.std() > 0.3, name  # not rounded to nearest, whose standard deviation is 0.29


def test_bf16_parameters_round_without_bias(device: torch.device, backend: str) -> None:
    (case,) = by_id(PRECISIONS, "adam-stochastic")
    size = 1 << 18
    param = Parameter(torch.ones(size, device=device, dtype=BF16))
    optimizer = make(case, [param], lr=1e-3, weight_decay=0)
    param.grad = torch.full_like(param, -1)
    for step in range(1, 4):
        optimizer.step()
        off = (param.detach().double().mean() - (1 + step * 1e-3)).abs()
        assert off <= 5 * 2.0**-8 * step / size**0.5
    assert optimizer.backend == backend


# ---- long runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["adam-master", "adam-fp16-master", "adam-remainder", "adam-24-bit", "adam-stochastic"]
)
@pytest.mark.parametrize("size", [8, 4096])
def test_small_steps_are_not_lost(name: str, size: int, device: torch.device, backend: str) -> None:
    """100 steps of 1e-4 from 1: bf16 alone would stay at 1."""
    (case,) = by_id(PRECISIONS, name)
    param = Parameter(torch.ones(size, device=device, dtype=BF16))
    optimizer = make(case, [param], lr=1e-4, weight_decay=0)
    param.grad = torch.ones_like(param)
    for _ in range(100):
        optimizer.step()
    assert optimizer.backend == backend
    weight = weight_of(param, optimizer.state[param])
    if name == "adam-stochastic":
        # A step moves one element in 39 (of 2^-8 or 2^-9): so does the mean of 100 steps of few.
        assert (weight.mean() - 0.99).abs() < (1e-3 if size == 4096 else 5 * 0.005 / size**0.5)
        assert (weight < 1).any()
        return
    exact = optimizer.state[param]["master_param"].dtype in (F32, torch.int16)
    # fp16 is rounded a hundred times, by 1.5e-4 each
    torch.testing.assert_close(
        weight, torch.full_like(weight, 0.99), rtol=1e-5 if exact else 1.2e-2, atol=0
    )
    assert (weight.mean() - 0.99).abs() < (1e-5 if exact else 1e-3)
    if exact:
        assert torch.equal(param.detach(), weight.to(BF16))


@pytest.mark.parametrize("name", ["adam-master", "adam-remainder"])
def test_decay_is_applied_in_fp32(name: str, device: torch.device, backend: str) -> None:
    (case,) = by_id(PRECISIONS, name)
    param = Parameter(torch.ones(4096, device=device, dtype=BF16))
    optimizer = make(case, [param], lr=1e-3, weight_decay=1e-3)
    param.grad = torch.zeros_like(param)
    for _ in range(100):
        optimizer.step()
    assert optimizer.backend == backend
    weight = weight_of(param, optimizer.state[param])
    torch.testing.assert_close(
        weight, torch.full_like(weight, (1 - 1e-6) ** 100), rtol=2e-6, atol=0
    )
    assert torch.equal(param.detach(), weight.to(BF16))


@pytest.mark.parametrize("name", ["adam-fp8-fp8", "adam-e5m2-e5m2", "adam-fp16-fp16"])
def test_an_element_of_small_gradients_keeps_its_pace(
    name: str, device: torch.device, native: str
) -> None:
    """1e-3 of the tensor's largest: its movement and its updates at most twice those of fp32."""
    (case,) = by_id(PRECISIONS, name)
    start = torch.randn(4096)
    params = [Parameter(start.clone().to(device)) for _ in range(2)]
    narrow = make(case, params[:1], lr=1e-3, weight_decay=0)
    fp32 = make(EVERY[0], params[1:], lr=1e-3)
    scale = torch.ones(4096)
    scale[5::16] = 1e-3
    largest = [torch.zeros(256, device=device) for _ in params]
    for _ in range(300):
        grad = (torch.randn(4096) * scale).to(device)
        before = [param.detach().clone() for param in params]
        for param, optimizer in zip(params, (narrow, fp32), strict=True):
            param.grad = grad
            optimizer.step()
        for i, (param, old) in enumerate(zip(params, before, strict=True)):
            largest[i] = largest[i].maximum((param.detach() - old).abs()[5::16])
    assert narrow.backend == native
    moved = [(param.detach().cpu() - start)[5::16].abs() for param in params]
    assert largest[0].max() <= 2 * largest[1].max()
    assert moved[0].max() <= 2 * moved[1].max()
    assert moved[0].mean() <= 2 * moved[1].mean()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", PRECISIONS, ids=str)
def test_what_is_not_finite_stays_where_it_is(
    case: Case, value: float, device: torch.device, backend: str
) -> None:
    """The rest of its block is what it would be if that gradient were zero."""
    params = new_params(case, device, [(SIZE,)])
    params.append(Parameter(params[0].detach().clone()))
    optimizers = [make(case, [param]) for param in params]
    for step in range(3):
        grad = torch.randn(SIZE).to(device, case.dtype)
        grad[7] = grad[4200] = 0
        for param in params:
            param.grad = grad.clone()
        if step == 1:
            assert params[0].grad is not None
            params[0].grad[7] = params[0].grad[4200] = value
        for optimizer in optimizers:
            optimizer.step()
    assert [optimizer.backend for optimizer in optimizers] == [backend, backend]
    own = torch.zeros(SIZE, dtype=torch.bool, device=device)
    own[7] = own[4200] = True
    bad, good = (optimizer.state[p] for optimizer, p in zip(optimizers, params, strict=True))
    by_sign = case.fused == "FusedLion" and not scaled_names(case, bad)  # that of an infinity too
    wrong = own if not by_sign or value != value else torch.zeros_like(own)
    assert torch.equal(~weight_of(params[0], bad).isfinite(), wrong)
    assert torch.equal(weight_of(params[0], bad)[~own], weight_of(params[1], good)[~own])
    for name in case.state_names:
        got, want = decoded(bad, name), decoded(good, name)
        assert torch.equal(~got.isfinite(), own), name
        assert torch.equal(got[~own], want[~own]), name


@pytest.mark.parametrize("case", PRECISIONS, ids=str)
def test_blocks_do_not_meet(case: Case, device: torch.device, backend: str) -> None:
    """A block becomes what it would among its like, and so do the others beside it."""
    info = torch.finfo(case.dtype)
    numbers = {1: torch.nan, 6: torch.inf, 8: info.max / 4, 15: info.tiny, 16: 0.0, 23: -torch.inf}
    param = new_params(case, device, [(32 * 256,)])[0].detach()
    grads = [torch.randn_like(param) for _ in range(3)]

    def run(numbers: dict[int, float]) -> list[Tensor]:
        own = Parameter(param.clone())
        optimizer = make(case, [own])
        for grad in grads:
            blocks = grad.clone().view(32, 256)
            for block, number in numbers.items():
                blocks[block] = number
            own.grad = blocks.flatten()
            optimizer.step()
        assert optimizer.backend == backend
        state = {name: value for name, value in optimizer.state[own].items() if name != "step"}
        return [bits(value).view(32, -1) for value in (own.detach(), *state.values())]

    mixed, ordinary = run(numbers), run({})
    others = [block for block in range(32) if block not in numbers]
    assert_same_bits([x[others] for x in mixed], [x[others] for x in ordinary])
    for block, number in numbers.items():
        alike = run(dict.fromkeys(range(32), number))
        assert_same_bits([x[block] for x in mixed], [x[block] for x in alike])


def test_a_maximum_does_not_follow_its_block(device: torch.device, backend: str) -> None:
    """One element of each block grows; the others' maximum stays what it was."""
    for dtype in ("fp16", "fp8", "fp8_e5m2"):
        param = Parameter(torch.zeros(4096, device=device))
        kept: Any = dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        optimizer = FusedAdam([param], lr=1e-3, betas=(0.9, 0.9), amsgrad=True, **kept)
        for step in range(300):
            param.grad = torch.ones(4096, device=device)
            param.grad[::256] = 1.02**step
            optimizer.step()
        root = optimizer.get_unscaled_state(param, "max_exp_avg_sq").sqrt()[1:256]
        assert optimizer.backend == backend
        # Above 1 by what the rounding of the second moment, of which it is the maximum, reaches.
        eps = torch.finfo(optimizer.state[param]["exp_avg_sq"].dtype).eps
        assert 1 - eps <= root.mean() <= 1 + 4 * eps
        assert root.max() <= 1 + 8 * eps
        assert float(param.detach()[1]) == pytest.approx(-0.3, rel=4 * eps)


def test_a_master_that_gets_no_gradient_stays(device: torch.device, backend: str) -> None:
    """Though the largest weight of its block moves."""
    param = Parameter((torch.rand(4096, device=device) + 0.5).bfloat16())
    param.data[::256] = 1.9
    before = param.detach().clone()
    optimizer = FusedSGD([param], lr=1e-4, master_weights=True, master_weight_dtype=torch.float16)
    for _ in range(200):
        param.grad = torch.zeros_like(param)
        param.grad[::256] = 1
        optimizer.step()
    assert optimizer.backend == backend
    master = optimizer.get_unscaled_state(param, "master_param")
    others = torch.arange(4096, device=device) % 256 != 0
    assert torch.equal(master[others], before[others].float())
    torch.testing.assert_close(
        master[::256], torch.full_like(master[::256], 1.88), rtol=1.5e-2, atol=0
    )


# ---- random bits --------------------------------------------------------------------------------


def codes(tensor: Tensor) -> Tensor:
    """The place of each element in the order of its dtype's numbers."""
    raw = bits(tensor).long()
    magnitude = raw & ((1 << 8 * tensor.element_size() - 1) - 1)
    return torch.where(raw < 0, -magnitude, magnitude)


def assert_same_codes(got: Any, want: Any, names: list[str]) -> None:
    """Equal, but for one code in at most one of a thousand elements."""
    for name in names:
        a, b = got[name].cpu(), want[name].cpu()
        if a.dtype == F32:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
            continue
        apart = (codes(a) - codes(b)).abs()
        if a.dtype == BF16:  # where a sum cancels, its rounding errors span many codes
            off = (a.float() - b.float()).abs().flatten()
            apart = apart.where(off > 2.0**-22 * b.float().abs().max(), 0)
        assert apart.max() <= 1, name
        assert (apart > 0).double().mean() <= 1e-3, name


def tossed(case: Case, optimizer: Any, param: Tensor) -> Tensor:
    """Where Lion takes the sign of a sum that cancels: rounding decides, on each path its own."""
    assert param.grad is not None
    grad = flat(param.grad).double()
    if case.rule is not lion or param not in optimizer.state:
        return torch.zeros_like(grad, dtype=torch.bool)
    exp_avg = decoded(optimizer.state[param], "exp_avg")
    beta1 = float(optimizer.param_groups[0]["betas"][0])
    return (exp_avg + (1 - beta1) * (grad - exp_avg)).abs() <= 2.0**-20 * grad.abs()


@pytest.mark.parametrize("case", PRECISIONS, ids=str)
def test_every_path_draws_the_same_bits(
    case: Case, device: torch.device, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step from the same start, the compiled path and plain PyTorch on a CPU."""
    params = new_params(case, device, [(9000,), (4100,)])
    copies = [Parameter(param.detach().cpu().clone()) for param in params]
    optimizer, other = make(case, params), make(case, copies)
    for _ in range(4):
        set_grads(params)
        for param, twin in zip(params, copies, strict=True):
            twin.grad = param.grad.cpu() if param.grad is not None else None
        coins = [tossed(case, other, twin) for twin in copies]
        monkeypatch.delenv("FUSEDOPT_BACKEND", raising=False)
        optimizer.step()
        monkeypatch.setenv("FUSEDOPT_BACKEND", "torch")
        other.step()
        assert optimizer.backend == native
        assert other.backend == "torch"
        for param, twin, coin in zip(params, copies, coins, strict=True):
            state, want = optimizer.state[param], other.state[twin]
            assert state.keys() == want.keys()
            twin.data[coin] = param.data.cpu()[coin]
            if "master_param" in want:
                want["master_param"][coin] = state["master_param"].cpu()[coin]
            ours, theirs = dict(state, param=param.detach()), dict(want, param=twin.detach())
            names = [name for name in ours if name != "step" and not name.endswith("_scale")]
            if "master_param" in names and not want["master_param"].is_floating_point():
                # Neighbouring weights can have different halves; what they join to is compared.
                names = [name for name in names if name not in ("master_param", "param")]
                a, b = weight_of(param, state).cpu(), weight_of(twin, want)
                grid = spacing(b, BF16) / 256 if want["master_param"].dtype == torch.int8 else 0
                assert ((a - b).abs() <= grid + 1e-5 * b.abs() + 1e-7).all()
            assert_same_codes(ours, theirs, names)
            for name in scaled_names(case, want):
                own = state[f"{name}_scale"].cpu()
                torch.testing.assert_close(own, want[f"{name}_scale"], rtol=1e-5, atol=0)
            twin.data.copy_(param.data)
            for name, value in state.items():
                want[name].copy_(value)


EXACT = ("adam-master", "adam-remainder", "adam-fp16-param-master", "sgd-master", "lion-master")
RANDOM = [case for case in PRECISIONS if case.id not in EXACT]


@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_the_seed_decides(case: Case, device: torch.device, backend: str) -> None:
    (param,) = new_params(case, device, [(SIZE,)])
    copies = [Parameter(param.detach().clone()) for _ in range(3)]
    optimizers = [make(case, [p], seed=s) for p, s in zip(copies, (0, 0, 1), strict=True)]
    for _ in range(2):
        set_grads(copies[:1])
        for p, optimizer in zip(copies, optimizers, strict=True):
            p.grad = copies[0].grad
            optimizer.step()
        assert optimizers[0].backend == backend
    same, again, other = map(snapshot, optimizers)
    assert_same_bits(again, same)
    assert any(not torch.equal(a, b) for a, b in zip(same, other, strict=True))


@pytest.mark.parametrize("name", ["adam-fp8-fp8", "adam-fp16-fp16", "adam-e5m2-e5m2"])
def test_moments_and_steps_draw_their_own_bits(
    name: str, device: torch.device, backend: str
) -> None:
    """Both moments store the same numbers here: only their random bits tell their codes apart."""
    (case,) = by_id(PRECISIONS, name)
    param = Parameter(torch.zeros(SIZE, device=device))
    optimizer = make(case, [param], **NO_MOMENTUM)
    param.grad = wide().to(device)
    seen = []
    for _ in range(3):
        optimizer.step()
        state = optimizer.state[param]
        seen += [bits(state["exp_avg"]).clone(), bits(state["exp_avg_sq"]).clone()]
    assert optimizer.backend == backend
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert (a != b).double().mean() > 0.2


# ---- encode and decode, split and join, alone ---------------------------------------------------


def noise_on(device: torch.device) -> Callable[..., Tensor]:
    """Random bits for as many elements as are asked for."""
    return lambda numel, bits=16: torch.randint(1 << bits, (numel,), dtype=torch.int32).to(device)


def roles() -> list[Any]:
    return list(fusedopt._Role)


@pytest.mark.parametrize("dtype", list(TOP), ids=str)
@pytest.mark.parametrize("role", roles(), ids=str)
def test_encode_undoes_decode(role: Any, dtype: torch.dtype, device: torch.device) -> None:
    """For every code and many scales, with any random bits."""
    code = fusedopt._CODES[dtype]
    size = 1 << 16
    raw = torch.empty(size, dtype=dtype, device=device)
    scale = torch.empty(size // 256, device=device)
    for _ in range(8):
        fill_with_codes(raw, scale, role.is_square, role.forgets)
        values = fusedopt._decode(code, role, raw, scale)
        again, new_scale = fusedopt._encode(code, role, values, noise_on(device))
        assert new_scale is not None
        assert_same_bits([bits(again), bits(new_scale)], [bits(raw), bits(scale)])


SPECIAL = [0.0, 1.0, 2.0**-126, 2.0**-149, 2.0**-133, 3.4028234663852886e38, 3.3895313892515355e38]


def finite_patterns(count: int, device: torch.device) -> Tensor:
    """Random fp32 bit patterns, ties of bf16, and the numbers at the ends of the range."""
    random = torch.randint(-(1 << 31), 1 << 31, (count,)).int()
    random[: count // 4] = (random[: count // 4] & ~0xFFFF) | 0x8000
    random[count // 4 : count // 2] += torch.randint(-2, 3, (count // 4,)).int()
    values = random.view(F32)
    values = values.where(values.isfinite(), 1.0)
    special = torch.tensor(SPECIAL)
    values[-2 * len(SPECIAL) :] = torch.cat((special, -special))
    return values.to(device)


def canonical_split(values: Tensor, remainder: Tensor) -> tuple[Tensor, Tensor]:
    """The format, independently: the nearest bf16, ties away from zero, and what is missing."""
    missing = 16 - 8 * remainder.element_size()
    pattern = values.view(torch.int32).long() >> missing << missing
    half = (pattern + 0x8000) >> 16
    return half.to(torch.int16).view(BF16), ((pattern - (half << 16)) >> missing).to(
        remainder.dtype
    )


def check_split(values: Tensor) -> None:
    """Exact for finite numbers; the half is .bfloat16() but for exact ties."""
    half, remainder = fusedopt._split(values, torch.int16, noise_on(values.device))
    assert torch.equal(bits(fusedopt._join(half, remainder)), bits(values))
    nearest = values.bfloat16()
    tie = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(bits(half)[~tie], bits(nearest)[~tie])
    assert (
        (bits(half)[tie].int() - bits(nearest)[tie].int()).abs().max() <= 1 if tie.any() else True
    )


def test_join_undoes_split(device: torch.device) -> None:
    values = finite_patterns(1 << 20, device)
    check_split(values)
    remainder = torch.empty(0, dtype=torch.int16, device=device)
    half, rest = fusedopt._split(values, torch.int16, noise_on(values.device))
    assert_same_bits(
        [bits(half), bits(rest)], [bits(t) for t in canonical_split(values, remainder)]
    )


@pytest.mark.slow
@pytest.mark.gpu
def test_join_undoes_split_for_every_finite_number() -> None:
    chunk = 1 << 26
    for start in range(-(1 << 31), 1 << 31, chunk):
        pattern = torch.arange(start, start + chunk, device="cuda").int()
        values = pattern.view(F32)
        check_split(values[values.isfinite()])


@pytest.mark.slow
@pytest.mark.gpu
def test_every_finite_number_survives_a_step_of_lr_0(cuda: torch.device) -> None:
    """As split and joined by the kernels."""
    (case,) = by_id(SPLIT, "adam-remainder")
    param = Parameter(torch.zeros(1 << 26, dtype=BF16, device=cuda))
    optimizer = make(case, [param], lr=0.0, weight_decay=0.0)
    param.grad = torch.ones_like(param)  # of a negative one -0 would become 0
    optimizer.step()
    state = optimizer.state[param]
    for start in range(-(1 << 31), 1 << 31, param.numel()):
        values = torch.arange(start, start + param.numel(), device=cuda).int().view(F32)
        values = values.where(values.isfinite(), 1)
        half, remainder = canonical_split(values, state["master_param"])
        param.data.copy_(half)
        state["master_param"].copy_(remainder)
        optimizer.step()
        assert optimizer.backend == "cuda"
        assert torch.equal(bits(param), bits(half))
        assert torch.equal(state["master_param"], remainder)
        joined = (bits(param).int() << 16) + remainder.int()
        assert torch.equal(joined, values.view(torch.int32))


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_a_split_master_survives_a_step_of_lr_0(
    case: Case, device: torch.device, backend: str
) -> None:
    (param,) = new_params(case, device, [(1 << 20,)])
    optimizer = make(case, [param], lr=0.0, weight_decay=0.0)
    optimizer.init_state()
    state = optimizer.state[param]
    values = finite_patterns(1 << 20, device)
    half, remainder = canonical_split(values, state["master_param"])
    param.data.copy_(half)
    state["master_param"].copy_(remainder)
    param.grad = torch.rand(1 << 20).to(param)  # of a negative one -0 would become 0
    optimizer.step()
    assert optimizer.backend == backend
    got, want = [param, state["master_param"]], [half, remainder]
    assert_same_bits([bits(t) for t in got], [bits(t) for t in want])


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_the_split_half_is_the_nearest(case: Case, device: torch.device, backend: str) -> None:
    (param,) = new_params(case, device, [(SIZE,)])
    optimizer = make(case, [param])
    for _ in range(3):
        set_grads([param])
        checked_step(case, optimizer)
    assert optimizer.backend == backend
    state = optimizer.state[param]
    want = canonical_split(weight_of(param, state).float(), state["master_param"])
    assert_same_bits([bits(param), bits(state["master_param"])], [bits(t) for t in want])
