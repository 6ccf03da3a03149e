"""What is compared: each optimizer in each precision beside its nearest peers; the workloads."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # fusedopt.py, installed or not

Groups = list[dict[str, Any]]
OURS = "fusedopt"
PEERS = ("flashoptim", "torchao", "bitsandbytes", "optimi", "apex", "transformer_engine")


@dataclass(frozen=True)
class Config:
    """One optimizer in one precision; configs of the same form do the same work, or nearly so."""

    form: str
    library: str
    make: Callable[[Groups], Any]
    clip: bool = False  # torch clips before each step
    gradient_reads: int = 1

    @property
    def name(self) -> str:
        return f"{self.form} / {self.library}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and their gradients."""
        return torch.bfloat16 if "bf16 p" in self.form else torch.float32

    def step(self, optimizer: Any, params: list[Tensor]) -> Callable[[], object]:
        if not self.clip:
            return lambda: optimizer.step()

        def clip_and_step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        return clip_and_step


class MasterCopies:
    """What is written by hand around torch.optim for narrow weights with fp32 masters."""

    def __init__(self, groups: Groups) -> None:
        self.params: list[Tensor] = [param for group in groups for param in group["params"]]
        self.masters = [param.detach().float() for param in self.params]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        of = dict(zip(self.params, self.masters, strict=True))
        groups = [{**group, "params": [of[p] for p in group["params"]]} for group in groups]
        self.inner = torch.optim.AdamW(groups, fused=True)

    @functools.cached_property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {
            param: {**self.inner.state[master], "master_param": master, "grad": master.grad}
            for param, master in zip(self.params, self.masters, strict=True)
        }

    @torch.no_grad()
    def step(self) -> None:
        grads = [param.grad for param in self.params if param.grad is not None]
        targets = [master.grad for master in self.masters if master.grad is not None]
        torch._foreach_copy_(targets, grads)
        self.inner.step()
        torch._foreach_copy_(self.params, self.masters)


class GradientNorm:
    """The norm of all gradients, with nothing to clip."""

    only_gradients = True

    def __init__(self, groups: Groups, module: str) -> None:
        self.params: list[Tensor] = [param for group in groups for param in group["params"]]
        self.clip = importlib.import_module(module).clip_grad_norm_
        self.state: dict[Tensor, dict[str, Any]] = {}

    def step(self) -> None:
        self.clip(self.params, 1e9)


def _both(dtype: Any) -> dict[str, Any]:
    return dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)


_MASTER = dict(master_weights=True)
_REMAINDERS = dict(store_param_remainders=True)
_TE_REMAINDERS = dict(master_weights=True, store_param_remainders=True)
_TE = "transformer_engine.pytorch.optimizers"
_CLIP = dict(max_grad_norm=1.0)
_MOMENTUM = dict(lr=0.1, momentum=0.9)

# Form, our class, its options. "p" stands for parameters and gradients.
_OURS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fp32", "FusedAdam", {}),
    ("fp32 amsgrad", "FusedAdam", dict(amsgrad=True)),
    ("fp32 p, bf16 states", "FusedAdam", _both("bf16")),
    ("fp32 p, fp16 states", "FusedAdam", _both("fp16")),
    ("fp32 p, fp8 states", "FusedAdam", _both("fp8")),
    ("bf16 p, fp32 states", "FusedAdam", {}),
    ("bf16 p, bf16 states", "FusedAdam", _both("bf16")),
    ("bf16 p stochastic, bf16 states", "FusedAdam", {**_both("bf16"), "stochastic_rounding": True}),
    ("bf16 p, fp16 states", "FusedAdam", _both("fp16")),
    ("bf16 p, fp8 states", "FusedAdam", _both("fp8")),
    ("bf16 p + fp32 master, fp32 states", "FusedAdam", _MASTER),
    ("bf16 p + fp32 master, bf16 states", "FusedAdam", {**_MASTER, **_both("bf16")}),
    ("bf16 p + fp32 master, fp16 states", "FusedAdam", {**_MASTER, **_both("fp16")}),
    ("bf16 p + fp32 master, fp8 states", "FusedAdam", {**_MASTER, **_both("fp8")}),
    (
        "bf16 p + fp16 master, fp8 states",
        "FusedAdam",
        {**_MASTER, **_both("fp8"), "master_weight_dtype": torch.float16},
    ),
    ("bf16 p + remainders, fp32 states", "FusedAdam", _REMAINDERS),
    ("bf16 p + remainders, bf16 states", "FusedAdam", {**_REMAINDERS, **_both("bf16")}),
    ("bf16 p + remainders, fp8 states", "FusedAdam", {**_REMAINDERS, **_both("fp8")}),
    ("bf16 p + 24 bits, fp8 states", "FusedAdam", {**_both("fp8"), "master_weight_bits": 24}),
    ("clip + fp32", "FusedAdam", _CLIP),
    ("clip + bf16 p, bf16 states", "FusedAdam", {**_CLIP, **_both("bf16")}),
    ("norm fp32", "clip_grad_norm_", {}),
    ("norm bf16 p", "clip_grad_norm_", {}),
    ("SGD fp32", "FusedSGD", _MOMENTUM),
    ("SGD fp32 p, fp8 momentum", "FusedSGD", dict(**_MOMENTUM, momentum_dtype="fp8")),
    ("SGD bf16 p, bf16 momentum", "FusedSGD", dict(**_MOMENTUM, momentum_dtype="bf16")),
    ("SGD bf16 p + fp32 master", "FusedSGD", {**_MASTER, **_MOMENTUM}),
    (
        "SGD bf16 p + remainders, fp8 momentum",
        "FusedSGD",
        {**_REMAINDERS, **_MOMENTUM, "momentum_dtype": "fp8"},
    ),
    ("Lion fp32", "FusedLion", {}),
    ("Lion bf16 p + fp32 master", "FusedLion", _MASTER),
    (
        "Lion bf16 p + remainders, fp8 states",
        "FusedLion",
        {**_REMAINDERS, "exp_avg_dtype": "fp8"},
    ),
)

# Form, library, module, class, its options.
_PEERS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("fp32", "torch fused", "torch.optim", "AdamW", dict(fused=True)),
    ("fp32", "torch foreach", "torch.optim", "AdamW", dict(foreach=True)),
    ("fp32", "optimi", "optimi", "AdamW", dict(lr=1e-3)),
    ("fp32", "apex", "apex.optimizers", "FusedAdam", {}),
    ("fp32", "transformer_engine", _TE, "FusedAdam", {}),
    ("fp32 amsgrad", "torch fused", "torch.optim", "AdamW", dict(fused=True, amsgrad=True)),
    ("fp32 p, fp8 states", "flashoptim", "flashoptim", "FlashAdamW", dict(lr=1e-3)),
    ("fp32 p, fp8 states", "torchao 8-bit", "torchao.optim", "AdamW8bit", {}),
    ("fp32 p, fp8 states", "torchao fp8", "torchao.optim", "AdamWFp8", {}),
    ("fp32 p, fp8 states", "bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {}),
    ("bf16 p, bf16 states", "torch fused", "torch.optim", "AdamW", dict(fused=True)),
    ("bf16 p, bf16 states", "torch foreach", "torch.optim", "AdamW", dict(foreach=True)),
    ("bf16 p, bf16 states", "optimi", "optimi", "AdamW", dict(lr=1e-3)),
    (
        "bf16 p stochastic, bf16 states",
        "torchao",
        "torchao.optim",
        "_AdamW",
        dict(bf16_stochastic_round=True),
    ),
    ("bf16 p, fp8 states", "torchao fp8", "torchao.optim", "AdamWFp8", {}),
    ("bf16 p, fp8 states", "bitsandbytes", "bitsandbytes.optim", "AdamW8bit", {}),
    ("bf16 p + fp32 master, fp32 states", "torch fused + copies", __name__, "MasterCopies", {}),
    ("bf16 p + fp32 master, fp32 states", "transformer_engine", _TE, "FusedAdam", _MASTER),
    (
        "bf16 p + fp32 master, bf16 states",
        "transformer_engine",
        _TE,
        "FusedAdam",
        {**_MASTER, **_both(torch.bfloat16)},
    ),
    (
        "bf16 p + fp32 master, fp16 states",
        "transformer_engine",
        _TE,
        "FusedAdam",
        {**_MASTER, **_both(torch.float16)},
    ),
    (
        "bf16 p + fp32 master, fp8 states",
        "transformer_engine",
        _TE,
        "FusedAdam",
        {**_MASTER, **_both(torch.uint8)},
    ),
    ("bf16 p + remainders, fp32 states", "transformer_engine", _TE, "FusedAdam", _TE_REMAINDERS),
    (
        "bf16 p + remainders, bf16 states",
        "transformer_engine",
        _TE,
        "FusedAdam",
        {**_TE_REMAINDERS, **_both(torch.bfloat16)},
    ),
    ("bf16 p + 24 bits, fp8 states", "flashoptim", "flashoptim", "FlashAdamW", dict(lr=1e-3)),
    ("clip + fp32", "torch fused", "torch.optim", "AdamW", dict(fused=True)),
    ("clip + bf16 p, bf16 states", "torch fused", "torch.optim", "AdamW", dict(fused=True)),
    ("SGD fp32", "torch fused", "torch.optim", "SGD", {**_MOMENTUM, "fused": True}),
    ("SGD fp32", "torch foreach", "torch.optim", "SGD", {**_MOMENTUM, "foreach": True}),
    ("SGD fp32", "transformer_engine", _TE, "FusedSGD", _MOMENTUM),
    (
        "SGD fp32 p, fp8 momentum",
        "flashoptim",
        "flashoptim",
        "FlashSGD",
        _MOMENTUM,
    ),
    (
        "SGD bf16 p, bf16 momentum",
        "torch fused",
        "torch.optim",
        "SGD",
        {**_MOMENTUM, "fused": True},
    ),
    ("Lion fp32", "optimi", "optimi", "Lion", dict(lr=1e-4)),
    (
        "Lion bf16 p + remainders, fp8 states",
        "flashoptim",
        "flashoptim",
        "FlashLion",
        dict(lr=1e-4),
    ),
)


def _maker(module: str, name: str, options: dict[str, Any]) -> Callable[[Groups], Any]:
    return lambda groups: getattr(importlib.import_module(module), name)(groups, **options)


def configs() -> Iterator[Config]:
    """Every config that can be made here, ours first in each form; says what is left out."""
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed, so not compared: {', '.join(missing)}", flush=True)
    for form, name, options in _OURS:
        reads = 2 if form.startswith("clip") else 1
        if form.startswith("norm"):
            for library, where in ((OURS, OURS), ("torch", "torch.nn.utils")):
                yield Config(form, library, functools.partial(GradientNorm, module=where))
        else:
            yield Config(form, OURS, _maker(OURS, name, options), gradient_reads=reads)
        for peer_form, library, peer_module, peer_name, peer_options in _PEERS:
            if peer_form == form and peer_module.split(".")[0] not in missing:
                make = _maker(peer_module, peer_name, peer_options)
                yield Config(form, library, make, clip=reads == 2, gradient_reads=reads)


# ---- Workloads: shapes of parameters, and in how many groups they come -------------------------


def _transformer() -> list[tuple[int, ...]]:
    """491 million parameters in 37 matrices."""
    width, ffn, vocabulary = 2048, 5632, 32000
    layer = [(3 * width, width), (width, width), (ffn, width), (ffn, width), (width, ffn)]
    return [(vocabulary, width), *(7 * layer), (vocabulary, width)]


def _gpt2() -> list[tuple[int, ...]]:
    """GPT-2's 124 million parameters: 148 tensors."""
    width = 768
    linears = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layer: list[tuple[int, ...]] = [(width,)] * 4
    for linear in linears:
        layer += [linear, (linear[0],)]
    return [(50257, width), (1024, width), *(12 * layer), (width,), (width,)]


@dataclass(frozen=True)
class Workload:
    """Parameters to update."""

    name: str
    shapes: Callable[[], list[tuple[int, ...]]]
    groups: int = 1
    forms: tuple[str, ...] = ()  # measured unless others are asked for; none: every form

    def make(self, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Groups]:
        """Parameters with gradients, and the groups they come in."""
        params: list[Tensor] = []
        for shape in self.shapes():
            param = torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device))
            param.grad = torch.randn_like(param).detach()
            params.append(param)
        groups: Groups = [
            {"params": params[i :: self.groups], "lr": 1e-3 / (i + 1)} for i in range(self.groups)
        ]
        return params, groups


_CORE = (
    "fp32",
    "bf16 p, bf16 states",
    "bf16 p + fp32 master, fp32 states",
    "bf16 p + remainders, fp8 states",
    "bf16 p + 24 bits, fp8 states",
    "clip + fp32",
    "SGD fp32",
    "Lion fp32",
)
WORKLOADS = (
    Workload("big", _transformer),
    Workload("gpt2", _gpt2, forms=_CORE),
    Workload("tiny", lambda: [(512,)] * 1000, forms=_CORE),
    Workload("scalars", lambda: [(1,)] * 50_000, forms=("fp32",)),
    Workload("giant", lambda: [(2**31 + 5,)], forms=("fp32", "bf16 p + remainders, fp8 states")),
    *(Workload(f"groups{n}", _gpt2, n, forms=("fp32",)) for n in (1, 2, 4, 8, 16)),
)
CPU_WORKLOADS = (Workload("cpu", lambda: [(1000, 1000)] * 10, forms=("fp32",)),)
