"""The table: which optimizer, in which setting, against which reference; shapes; the step check.

A row per setting. The rules are stated once more here, in fp64 or whatever the tensors are, and are
tested against torch.optim; the formats of states are read here without the optimizer's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

import fusedopt

Options = dict[str, Any]
States = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, States, int, Options], tuple[Tensor, States]]

# ---- rules --------------------------------------------------------------------------------------


def adam(weight: Tensor, grad: Tensor, old: States, step: int, o: Options) -> tuple[Tensor, States]:
    (beta1, beta2), lr, decay = map(float, o["betas"]), float(o["lr"]), float(o["weight_decay"])
    grad = -grad if o["maximize"] else grad
    if o["adam_w_mode"]:
        weight = weight - lr * decay * weight
    else:
        grad = grad + decay * weight
    new = {"exp_avg": old["exp_avg"] + (1 - beta1) * (grad - old["exp_avg"])}
    new["exp_avg_sq"] = second = beta2 * old["exp_avg_sq"] + (1 - beta2) * grad * grad
    if o["amsgrad"]:
        new["max_exp_avg_sq"] = second = torch.maximum(old["max_exp_avg_sq"], second)
    correction1, correction2 = (1 - b**step if o["bias_correction"] else 1 for b in (beta1, beta2))
    denominator = second.sqrt() / correction2**0.5 + float(o["eps"])
    return weight - lr / correction1 * new["exp_avg"] / denominator, new


def sgd(weight: Tensor, grad: Tensor, old: States, step: int, o: Options) -> tuple[Tensor, States]:
    lr, momentum, decay = float(o["lr"]), float(o["momentum"]), float(o["weight_decay"])
    grad = -grad if o["maximize"] else grad
    late = bool(o["wd_after_momentum"])
    grad = grad if late else grad + decay * weight
    new = {}
    if momentum:
        buffer = momentum * old["momentum_buffer"] + (1 - float(o["dampening"])) * grad
        new["momentum_buffer"] = buffer = grad if step == 1 else buffer
        grad = grad + momentum * buffer if o["nesterov"] else buffer
    return weight - lr * (grad + decay * weight if late else grad), new


def lion(weight: Tensor, grad: Tensor, old: States, step: int, o: Options) -> tuple[Tensor, States]:
    (beta1, beta2), lr, decay = map(float, o["betas"]), float(o["lr"]), float(o["weight_decay"])
    grad = -grad if o["maximize"] else grad
    direction = (old["exp_avg"] + (1 - beta1) * (grad - old["exp_avg"])).sign()
    weight = weight - lr * decay * weight
    exp_avg = old["exp_avg"] + (1 - beta2) * (grad - old["exp_avg"])
    return weight - lr * direction, {"exp_avg": exp_avg}


# ---- the table ----------------------------------------------------------------------------------

ADAM_STATES = ("exp_avg", "exp_avg_sq")
AMSGRAD_STATES = (*ADAM_STATES, "max_exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """One setting: what is built, and what it must agree with."""

    id: str
    fused: str  # a class of fusedopt
    reference: (
        type[torch.optim.Optimizer] | None
    )  # None: torch has none, the rule in fp32 stands in
    kwargs: Options = field(default_factory=dict)
    state_names: tuple[str, ...] = ADAM_STATES
    rule: Rule = adam
    dtype: torch.dtype = torch.float32  # of the parameters

    def __str__(self) -> str:
        return self.id


def adam_case(name: str, /, **kwargs: Any) -> Case:
    reference = Adam if kwargs.get("adam_w_mode") is False else AdamW
    known = kwargs.get("bias_correction", True)
    states = AMSGRAD_STATES if kwargs.get("amsgrad") else ADAM_STATES
    return Case(f"adam-{name}", "FusedAdam", reference if known else None, kwargs, states)


def sgd_case(name: str, /, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Case:
    reference = None if kwargs.get("wd_after_momentum") else SGD
    states = ("momentum_buffer",) if kwargs.get("momentum") else ()
    return Case(f"sgd-{name}", "FusedSGD", reference, kwargs, states, sgd, dtype)


def lion_case(name: str, /, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Case:
    if dtype != torch.float32 or "exp_avg_dtype" in kwargs:
        # On coarse grids beta1 * m and (1 - beta1) * g may cancel, and nothing but the rounding of
        # 0.9 would decide on a sign: these are exact.
        kwargs.setdefault("betas", (0.875, 0.96875))
    return Case(f"lion-{name}", "FusedLion", None, kwargs, ("exp_avg",), lion, dtype)


def scalar(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value)


# Every combination that torch's own tests of Adam, AdamW and SGD use, and our further switches.
CASES = (
    adam_case("default"),
    adam_case("lr", lr=0.01),
    adam_case("lr-tensor", lr=scalar(0.01)),
    adam_case("betas-tensor", lr=scalar(0.01), betas=(scalar(0.9), scalar(0.99))),
    adam_case("betas-3d", lr=scalar(0.01), betas=(scalar(0.9, 1, 1, 1), scalar(0.99, 1, 1))),
    adam_case("betas-zero", lr=0.01, betas=(0.0, 0.0)),
    adam_case("betas-low", lr=0.01, betas=(0.3, 0.5), eps=1e-3),
    adam_case("decay", lr=0.1, weight_decay=0.1),
    adam_case("decay-maximize", lr=0.1, weight_decay=0.1, maximize=True),
    adam_case("decay-amsgrad", lr=0.01, weight_decay=0.1, amsgrad=True),
    adam_case("l2", lr=0.01, weight_decay=0.1, adam_w_mode=False),
    adam_case("l2-maximize", lr=0.01, weight_decay=0.1, adam_w_mode=False, maximize=True),
    adam_case("l2-amsgrad", lr=0.01, weight_decay=0.9, adam_w_mode=False, amsgrad=True),
    adam_case("capturable", lr=0.01, weight_decay=0.1, capturable=True),
    adam_case("capturable-lr-tensor", lr=scalar(0.01), amsgrad=True, capturable=True),
    adam_case("uncorrected", lr=1e-3, bias_correction=False),
    adam_case(
        "uncorrected-l2", lr=1e-3, bias_correction=False, adam_w_mode=False, weight_decay=0.1
    ),
    sgd_case("default", lr=0.1),
    sgd_case("lr-tensor", lr=scalar(0.01)),
    sgd_case("momentum", lr=0.01, momentum=0.9),
    sgd_case("dampening", lr=0.01, momentum=0.9, dampening=0.5),
    sgd_case("decay", lr=0.01, momentum=0.9, weight_decay=0.1),
    sgd_case("nesterov", lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    sgd_case("maximize", lr=0.01, weight_decay=0.1, maximize=True),
    sgd_case("late-decay", lr=0.01, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
    sgd_case("late-decay-nesterov", momentum=0.9, nesterov=True, wd_after_momentum=True),
    sgd_case("capturable", lr=scalar(0.01), momentum=0.9, capturable=True),
    lion_case("default"),
    lion_case("lr-tensor", lr=scalar(0.01)),
    lion_case("betas-tensor", lr=0.01, betas=(scalar(0.9), scalar(0.95))),
    lion_case("decay-maximize", lr=0.01, weight_decay=0.1, maximize=True),
    lion_case("capturable", lr=scalar(0.01), weight_decay=0.1, capturable=True),
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def adam_precision(
    name: str, dtype: torch.dtype, /, first: Any, second: Any, **kwargs: Any
) -> Case:
    # A power of two: where L2 decay cancels a gradient, 0.1 in fp32 would leave its own error.
    kwargs |= dict(lr=0.01, weight_decay=0.125, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    states = AMSGRAD_STATES if kwargs.get("amsgrad") else ADAM_STATES
    reference = Adam if kwargs.get("adam_w_mode") is False else AdamW
    return Case(f"adam-{name}", "FusedAdam", reference, kwargs, states, dtype=dtype)


FP16_MASTER: Options = dict(master_weights=True, master_weight_dtype=torch.float16)
REMAINDERS: Options = dict(store_param_remainders=True)
BITS24: Options = dict(master_weight_bits=24)
STOCHASTIC: Options = dict(stochastic_rounding=True)

# Each dtype of each moment, each kind of master and of parameter, and the combinations people use.
ADAM_PRECISIONS = (
    adam_precision("bf16-bf16", F32, "bf16", "bf16"),
    adam_precision("fp16-fp16", F32, "fp16", "fp16"),
    adam_precision("fp8-fp8", F32, "fp8", torch.uint8),
    adam_precision("e5m2-e5m2", F32, "fp8_e5m2", torch.float8_e5m2),
    adam_precision("fp32-fp8", F32, None, "fp8"),
    adam_precision("fp8-fp32", F32, "fp8", "fp32"),
    adam_precision("bf16-fp16", F32, "bf16", "fp16"),
    adam_precision("fp16-e5m2", F32, "fp16", "fp8_e5m2"),
    adam_precision("e5m2-bf16", F32, "fp8_e5m2", "bf16"),
    adam_precision("amsgrad-bf16", F32, None, "bf16", amsgrad=True),
    adam_precision("amsgrad-fp16", F32, "bf16", "fp16", amsgrad=True),
    adam_precision("amsgrad-fp8", F32, "fp8", "fp8", amsgrad=True),
    adam_precision("master", BF16, None, None, master_weights=True),
    adam_precision("fp16-param-master", F16, None, None, master_weights=True),
    adam_precision("master-bf16", BF16, "bf16", "bf16", master_weights=True),
    adam_precision("fp16-master", BF16, None, None, **FP16_MASTER),
    adam_precision("fp16-master-fp8", BF16, "fp8", "fp8", **FP16_MASTER),
    adam_precision("remainder", BF16, None, None, store_param_remainders=True),
    adam_precision("remainder-fp8", BF16, "fp8", "fp8", store_param_remainders=True),
    adam_precision("24-bit", BF16, None, None, master_weight_bits=24),
    adam_precision("24-bit-fp8", BF16, "fp8", "fp8", master_weight_bits=24),
    adam_precision("stochastic", BF16, None, None, stochastic_rounding=True),
    adam_precision("stochastic-fp8", BF16, "fp8", "fp8", stochastic_rounding=True),
    # What kernels keep out of their hot path.
    adam_precision("l2-fp8", F32, "fp8", "fp8", adam_w_mode=False),
    adam_precision("l2-remainder-fp8", BF16, "fp8", "fp8", adam_w_mode=False, **REMAINDERS),
    adam_precision("l2-24-bit-fp16", BF16, "fp16", "fp16", adam_w_mode=False, **BITS24),
    adam_precision("beta1-low-fp8", F32, "fp8", "fp8", betas=(0.3, 0.9)),
    adam_precision("l2-stochastic", BF16, "bf16", "bf16", adam_w_mode=False, **STOCHASTIC),
)

MOMENTUM: Options = dict(lr=0.01, momentum=0.9, weight_decay=0.1)
PRECISIONS = (
    *ADAM_PRECISIONS,
    sgd_case("fp8", momentum_dtype="fp8", **MOMENTUM),
    sgd_case(
        "remainder-bf16", BF16, momentum_dtype="bf16", store_param_remainders=True, **MOMENTUM
    ),
    sgd_case("24-bit-fp16", BF16, momentum_dtype="fp16", master_weight_bits=24, **MOMENTUM),
    sgd_case("fp16-master-fp8", BF16, momentum_dtype="fp8", **FP16_MASTER, **MOMENTUM),
    sgd_case("master", BF16, master_weights=True, **MOMENTUM),
    sgd_case("stochastic-fp8", BF16, momentum_dtype="fp8", **STOCHASTIC, **MOMENTUM),
    lion_case("fp8", exp_avg_dtype="fp8", lr=0.01),
    lion_case("remainder-bf16", BF16, exp_avg_dtype="bf16", lr=0.01, store_param_remainders=True),
    lion_case("24-bit-e5m2", BF16, exp_avg_dtype="fp8_e5m2", lr=0.01, master_weight_bits=24),
    lion_case("master", BF16, lr=0.01, master_weights=True),
    lion_case("fp16-master-fp8", BF16, exp_avg_dtype="fp8", lr=0.01, **FP16_MASTER),
    lion_case("stochastic", BF16, exp_avg_dtype="bf16", lr=0.01, **STOCHASTIC),
)

NARROW = (
    adam_precision("bf16-param", BF16, None, None),
    adam_precision("fp16-param", F16, None, None),
    adam_precision("bf16-param-amsgrad", BF16, None, None, amsgrad=True),
    adam_precision("fp16-param-amsgrad", F16, None, None, amsgrad=True),
)

EVERY = (*CASES, *NARROW, *PRECISIONS)

# Around every vector width, block, tile and limit of the kernels.
SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17]
SIZES += [n + i for n in (256, 512, 1024, 2048, 4096, 5120, 6144) for i in (-1, 0, 1)]
LARGE_SIZES = [n + i for n in (16384, 65536) for i in (-1, 0, 1)]


def by_id(rows: Iterable[Case], *names: str) -> list[Case]:
    found = {row.id: row for row in rows}
    return [found[name] for name in names]


# Every signature is in these.
ROWS = (
    *by_id(CASES, "adam-default", "adam-decay-amsgrad"),
    *by_id(CASES, "sgd-default", "sgd-momentum", "lion-default"),
    *NARROW,
    *PRECISIONS,
)


def make(case: Case, params: Any, **overrides: Any) -> Any:
    """The fused optimizer of a row."""
    return getattr(fusedopt, case.fused)(params, **{**case.kwargs, **overrides})


def new_params(
    case: Case, device: torch.device, shapes: Iterable[Sequence[int]]
) -> list[torch.nn.Parameter]:
    values = [torch.randn(tuple(shape)).to(device, case.dtype) for shape in shapes]
    return [torch.nn.Parameter(value) for value in values]


def set_grads(params: Iterable[Tensor], missing: float = 0.0) -> None:
    """Give random gradients, of another scale each, to all parameters but a part of them."""
    for i, param in enumerate(params):
        grad = torch.randn(param.shape) * 10.0 ** (i % 4 - 2)
        absent = bool(torch.rand(()) < missing)
        param.grad = None if absent else grad.to(param.device, param.dtype)


def copy_grads(params: Iterable[Tensor], copies: Iterable[Tensor]) -> None:
    """Give the same gradients to copies, in tensors of their own."""
    for param, copied in zip(params, copies, strict=True):
        copied.grad = param.grad.clone() if param.grad is not None else None


def all_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# ---- what is stored, in fp64 --------------------------------------------------------------------


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory."""
    tensor = tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers, so that nan equals nan and 0 differs from -0."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat(tensor).view(integer[tensor.element_size()])


def scales(state: States, name: str) -> Tensor:
    """The block scale of each element, or ones."""
    scale, size = state.get(f"{name}_scale"), state[name].numel()
    if scale is None:
        return torch.ones(size, dtype=torch.float64, device=state[name].device)
    return scale.double().repeat_interleave(256)[:size]


def roots(state: States, name: str) -> Tensor:
    """A state; of a block-scaled second moment the root, which is what is stored of it."""
    stored = flat(state[name])
    values = stored.float().double()
    if is_fp8_root(state, name):  # whose sign bit is half a step more
        half = (bits(stored) < 0) * spacing(values.abs(), stored.dtype) / 2
        values = values.abs() + half.where(values.isfinite(), 0)
    return values * scales(state, name)


def is_fp8_root(state: States, name: str) -> bool:
    return is_root(state, name) and state[name].element_size() == 1


def is_root(state: States, name: str) -> bool:
    return name.endswith("_sq") and f"{name}_scale" in state


def decoded(state: States, name: str) -> Tensor:
    return roots(state, name).square() if is_root(state, name) else roots(state, name)


def weight_of(param: Tensor, state: States) -> Tensor:
    """The weight that the optimizer works with: the master's if there is one."""
    master = state.get("master_param")
    if master is None:
        return flat(param).double()
    if master.is_floating_point():
        return decoded(state, "master_param")
    missing = 16 - 8 * master.element_size()
    joined = (flat(param).view(torch.int16).int() << 16) + (flat(master).int() << missing)
    return joined.view(torch.float32).double()


MANTISSA_AND_LOWEST = {
    torch.float32: (23, -126),
    torch.bfloat16: (7, -126),
    torch.float16: (10, -14),
    torch.float8_e4m3fn: (3, -6),
    torch.float8_e5m2: (2, -14),
}


def spacing(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The distance of neighbouring numbers of a dtype at each value."""
    mantissa, lowest = MANTISSA_AND_LOWEST[dtype]
    exponent = torch.frexp(values.abs())[1] - 1
    exponent = exponent.where(values != 0, lowest).clamp(min=lowest)
    return torch.ldexp(torch.ones_like(values), exponent - mantissa)


def step_of(values: Tensor, state: States, name: str) -> Tensor:
    """The distance of neighbouring stored numbers of a state at each value, before its scale."""
    return spacing(values, state[name].dtype) / (2 if is_fp8_root(state, name) else 1)


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The bits of all parameters and states."""
    found = []
    for param in all_params(optimizer):
        state = optimizer.state.get(param, {})
        found += [bits(param), *(bits(state[key]) for key in sorted(state))]
    return [tensor.clone() for tensor in found]


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a.cpu(), b.cpu()), f"tensor {i}: {(a.cpu() != b.cpu()).sum()} differ"


# ---- the step check -----------------------------------------------------------------------------


def ulp(name: str, want: Tensor) -> Tensor:
    """An ulp of fp32: of each element where nothing cancels, else of the largest."""
    if not name.endswith("_sq"):
        return spacing(want.abs().max())
    # Where gradient and L2 decay cancel, what is left of the second moment is rounding: an element
    # far below the largest is measured as one 2^-20 of it.
    return spacing(want.clamp(min=want.max() * 2.0**-20))


def in_ulps(name: str, got: Tensor, want: Tensor) -> Tensor:
    return (got.double() - want).abs() / ulp(name, want) if want.numel() else want


def gradient_of(param: Tensor, group: Options) -> Tensor | None:
    return getattr(param, "decoupled_grad", None) if group["use_decoupled_grad"] else param.grad


def one_step(
    case: Case, optimizer: torch.optim.Optimizer, param: Tensor, group: Options, dtype: torch.dtype
) -> tuple[Tensor, States] | None:
    """What the rule, computed in `dtype`, makes of what the optimizer now holds."""
    grad = gradient_of(param, group)
    if grad is None:
        return None
    state = optimizer.state.get(param, {})
    weight = weight_of(param, state)
    old = {n: decoded(state, n) if n in state else weight * 0 for n in case.state_names}
    step = int(state["step"]) + 1 if "step" in state else 1
    laid_out = flat(torch.empty_like(param, dtype=grad.dtype).copy_(grad)).to(dtype)
    old = {name: value.to(dtype) for name, value in old.items()}
    return case.rule(weight.to(dtype), laid_out, old, step, group)


def checked_step(case: Case, optimizer: Any) -> None:
    """One step; params and states against the rule in fp64 from the same start.

    A value in fp32 may be off by 1.5 times what the rule in fp32 is off, plus one ulp; a narrow one
    by half a step of its grid more, or a whole one if it is rounded stochastically.
    """
    todo = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    wanted = [one_step(case, optimizer, p, group, torch.float64) for p, group in todo]
    in_fp32 = [one_step(case, optimizer, p, group, torch.float32) for p, group in todo]
    before = [bits(p).clone() for p, _ in todo]
    steps = [optimizer.state[p]["step"].clone() if p in optimizer.state else 0 for p, _ in todo]
    optimizer.step()
    allowed = dict.fromkeys(("weight", *case.state_names), 1.0)
    for want, near in zip(wanted, in_fp32, strict=True):
        if want is not None and near is not None and want[0].numel():
            exact = {"weight": want[0], **want[1]}
            for name, value in {"weight": near[0], **near[1]}.items():
                error = in_ulps(name, value, exact[name]).max().item()
                allowed[name] = max(allowed[name], 1 + 1.5 * error)
    for (param, group), want, bits_before, step in zip(todo, wanted, before, steps, strict=True):
        where = f"{tuple(param.shape)} {param.dtype}"
        if want is None:
            assert torch.equal(bits(param), bits_before), where
            assert param not in optimizer.state or optimizer.state[param]["step"] == step, where
            continue
        state = optimizer.state[param]
        assert state["step"] == step + 1, where
        if param.numel() == 0:
            continue
        check_weight(where, param, state, group, want[0], allowed["weight"])
        for name, value in want[1].items():
            check_state(f"{name} of {where}", name, state, value, allowed[name])


def check_state(where: str, name: str, state: States, want: Tensor, ulps: float) -> None:
    tensor = state[name]
    slack, got = ulps * ulp(name, want), roots(state, name)
    if is_root(state, name):  # an error of v is half as large, relatively, in its root
        want, slack = want.sqrt(), slack / (2 * want.sqrt()).clamp(min=1e-30)
        slack = slack + spacing(want)
    if tensor.dtype != torch.float32:
        scale = scales(state, name)
        largest = torch.maximum(got.abs(), want.abs()) / scale
        slack = slack + step_of(largest, state, name) * scale
    off = (got - want).abs() / slack
    assert off.max() <= 1, f"{where}: error {off.max():.3g} of the allowed one"


def check_weight(
    where: str, param: Tensor, state: States, group: Options, want: Tensor, ulps: float
) -> None:
    master = state.get("master_param")
    slack, got = ulps * spacing(want.abs().max()), weight_of(param, state)
    if master is None:
        part = 1.0 if group["stochastic_rounding"] and param.dtype == torch.bfloat16 else 0.5
        if param.dtype != torch.float32:
            slack = slack + part * spacing(torch.maximum(got.abs(), want.abs()), param.dtype)
    elif master.dtype == torch.int8:  # 24 bits: 2^-8 of a step of bf16
        slack = slack + spacing(torch.maximum(got.abs(), want.abs()), torch.bfloat16) / 256
    elif master.dtype == torch.float16:
        scale = scales(state, "master_param")
        largest = torch.maximum(got.abs(), want.abs()) / scale
        assert torch.equal(bits(param), bits(got.float().to(param.dtype))), where
        slack = slack + spacing(largest, torch.float16) * scale
    elif master.dtype == torch.float32:
        assert torch.equal(bits(param), bits(master.to(param.dtype))), where
    off = (got - want).abs() / slack
    assert off.max() <= 1, f"weight of {where}: error {off.max():.3g} of the allowed one"
