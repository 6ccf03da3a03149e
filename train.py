"""Train a small language model on bytes, with any optimizer that conf/ can name.

    python train.py
    python train.py optimizer=fused_adam optimizer.lr=3e-4 optimizer.exp_avg_dtype=fp8
    python train.py resume=outputs/2026-01-31/12-00-00

Read `main`, at the bottom, first: it builds a `Run`, `train` drives it, `report` says what it cost.
The run's own folder gets metrics.csv, loss.png and checkpoint.pt.
"""

from __future__ import annotations

import csv
import glob
import json
import math
import os
import pickle
import resource
import shutil
import signal
import statistics
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import instantiate, to_absolute_path
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

CONF = Path(__file__).resolve().parent / "conf"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ConfigError(ValueError):
    """A setting that cannot work: shown as one line, without a traceback."""


def spelled(value: Any) -> str:
    """A value as the command line spells it."""
    return json.dumps(value, default=str)


def options_with(group: str, key: str) -> str:
    """The options of a group that have this key."""
    files = sorted((CONF / group).glob("*.yaml"))
    found = [file.stem for file in files if key in set(OmegaConf.load(file))]
    return f"{group}={', '.join(found)}" if found else ""


# ---------------------------------------------------------------------------- data (conf/data)


def stdlib() -> tuple[Tensor, Tensor]:
    """The Python standard library's own source files."""
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    return split([file for file in root.rglob("*.py") if not installed & set(file.parts)], root)


def text(path: str | None) -> tuple[Tensor, Tensor]:
    """Any file, every file of a folder, or whatever a glob finds."""
    if not path:
        raise ValueError("data.path must be a file, a folder or a glob, got none")
    root = Path(to_absolute_path(str(path)))
    found = root.rglob("*") if root.is_dir() else map(Path, glob.glob(str(root), recursive=True))
    return split([file for file in found if file.is_file()], root)


def split(files: list[Path], source: Path) -> tuple[Tensor, Tensor]:
    """Training and validation bytes: every tenth file is held out, of one file its last tenth."""
    if not files:
        raise ValueError(f"no file at {source}; a file, a folder or a glob is allowed")
    contents = [file.read_bytes() for file in sorted(files)]
    if len(contents) == 1:
        cut = len(contents[0]) * 9 // 10
        return as_tensor([contents[0][:cut]]), as_tensor([contents[0][cut:]])
    step = min(10, len(contents))
    held_out = contents[step - 1 :: step]
    del contents[step - 1 :: step]
    return as_tensor(contents), as_tensor(held_out)


def as_tensor(contents: list[bytes]) -> Tensor:
    joined = bytearray(b"".join(contents))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0).byte()


# ---------------------------------------------------------------------------- models (conf/model)


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        least = 256 if name == "vocab_size" else 1
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


class Block(nn.Module):
    """Attention, then a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_perceptron = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.query_key_value(self.norm_attention(x))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(-2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm_perceptron(x))))
        return x + hidden


class GPT(nn.Module):
    """A decoder in GPT-2's shape: learned positions, norms first, output tied to the embedding."""

    def __init__(self, layers: int, heads: int, width: int, context: int, vocab_size: int) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, layers=layers, heads=heads, width=width, context=context)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.context = context
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_shortcut = name.endswith(("mix.weight", "down.weight"))
                depth = 2 * layers if ends_shortcut else 1
                nn.init.normal_(parameter, std=0.5 / math.sqrt(width * depth))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class MLP(nn.Module):
    """Predicts each byte from the `last` ones before it, with one hidden layer."""

    def __init__(self, last: int, width: int, vocab_size: int) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, last=last, width=width)
        if width % 4:
            raise ValueError(f"width must be a multiple of 4, got {width}")
        self.last = last
        self.token = nn.Embedding(vocab_size, width // 4)
        self.up = nn.Linear(last * (width // 4), width)
        self.down = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        recent = F.pad(tokens, (self.last - 1, 0)).unfold(1, self.last, 1)
        logits: Tensor = self.down(F.gelu(self.up(self.token(recent).flatten(-2))))
        return logits


# ---------------------------------------------------------------------------- what a run is made of


@dataclass(frozen=True)
class Trainer:
    """conf/trainer, checked."""

    steps: int
    batch_size: int
    seq_len: int
    accumulate: int
    warmup_steps: int
    final_lr: float
    max_grad_norm: float | None
    log_every: int
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    grad_release: bool
    step_in_backward: str
    cuda_graph: bool
    compile: bool

    def __post_init__(self) -> None:
        may_be_zero = ("warmup_steps", "eval_every", "checkpoint_every")
        for name, kind in self.__annotations__.items():
            value, least = getattr(self, name), 0 if name in may_be_zero else 1
            if kind == "int" and (type(value) is not int or value < least):
                raise ConfigError(
                    f"trainer.{name} must be an integer >= {least}, got {spelled(value)}"
                )
            if kind == "bool" and type(value) is not bool:
                raise ConfigError(f"trainer.{name} must be true or false, got {spelled(value)}")
        if not isinstance(self.step_in_backward, str):
            name = spelled(self.step_in_backward)
            raise ConfigError(
                f"trainer.step_in_backward must be the name of a function, got {name}"
            )
        if not (isinstance(self.final_lr, (int, float)) and 0 <= self.final_lr <= 1):
            raise ConfigError(f"trainer.final_lr must lie in [0, 1], got {spelled(self.final_lr)}")
        norm = self.max_grad_norm
        if not (norm is None or (isinstance(norm, (int, float)) and norm > 0)):
            raise ConfigError(f"trainer.max_grad_norm must be null or > 0, got {spelled(norm)}")


class Run:
    """The parts of one run, each checked before the first step."""

    def __init__(self, config: DictConfig, folder: Path, overrides: list[str]) -> None:
        self.folder, self.overrides = folder, overrides
        self.trainer = trainer = build_trainer(config.trainer)
        self.device = pick_device(config.device)
        check_combination(config, trainer)
        self.autocast = DTYPES.get(config.precision.autocast)
        if type(config.seed) is not int or not 0 <= config.seed < 2**63:
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {spelled(config.seed)}")
        torch.manual_seed(config.seed)
        self.sampler = torch.Generator().manual_seed(config.seed)
        self.train_bytes, self.validation_bytes = (
            part.to(self.device) for part in build("data", config.data)
        )
        sizes = len(self.train_bytes), len(self.validation_bytes)
        if min(sizes) <= trainer.seq_len:
            raise ConfigError(
                "data: the training and the validation text must each have more than "
                f"trainer.seq_len={trainer.seq_len} bytes, got {sizes[0]} and {sizes[1]} (of "
                "several files every tenth, or the last, is for validation)"
            )
        self.model = build("model", config.model)
        self.model.to(self.device, DTYPES[config.precision.param_dtype])
        if trainer.seq_len > getattr(self.model, "context", math.inf):
            raise ConfigError(
                f"trainer.seq_len must be <= {self.model.context}, the model's context, "
                f"got {trainer.seq_len}"
            )
        self.predict = torch.compile(self.model) if trainer.compile else self.model
        self.gradients = GradientPeak(self.model)
        self.optimizer = build_optimizer(config, self.model, self.device)
        # an optimizer with a max_grad_norm of its own clips by itself
        self.clip = None if "max_grad_norm" in config.optimizer else trainer.max_grad_norm
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision.loss_scaling)
        self.schedule = Schedule(self.optimizer, trainer, self.device)
        self.clock = Clock(self.device)
        self.step = self.resumed_at = 0
        self.rows: list[dict[str, float]] = []  # of metrics.csv


def build_trainer(node: DictConfig) -> Trainer:
    names, values = [*Trainer.__annotations__], {str(key): value for key, value in node.items()}
    for key in values:
        if key not in names:
            raise ConfigError(f"there is no trainer.{key}; allowed: {', '.join(names)}")
    return Trainer(**values)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["auto", "cpu", *["cuda"][:gpus], *(f"cuda:{i}" for i in range(gpus))]
    if name not in allowed:
        raise ConfigError(f"device must be one of {', '.join(allowed)} here, got {spelled(name)}")
    device = torch.device(name if name != "auto" else "cuda" if gpus else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def check_combination(config: DictConfig, trainer: Trainer) -> None:
    """What one group asks for, another must be able to give."""
    precision, fused = config.precision, "master_weights" in config.optimizer
    for key, allowed in (("param_dtype", [*DTYPES]), ("autocast", [*DTYPES, None])):
        if precision[key] not in allowed:
            listed = ", ".join(name or "null" for name in allowed)
            got = spelled(precision[key])
            raise ConfigError(f"precision.{key} must be one of {listed}, got {got}")
    for key in ("loss_scaling", "master_weights", "store_param_remainders"):
        if type(precision[key]) is not bool:
            got = spelled(precision[key])
            raise ConfigError(f"precision.{key} must be true or false, got {got}")
    for key in ("master_weights", "store_param_remainders", "state_dtype"):
        if precision[key] and not fused:
            asked = f"precision.{key}={spelled(precision[key])}"
            others = "precision=fp32, bf16_amp or fp16"
            raise ConfigError(needs_fused(asked, config.optimizer._target_, others))
    if config.optimizer.get("use_decoupled_grad"):
        raise ConfigError(
            "optimizer.use_decoupled_grad=true needs a p.decoupled_grad, which train.py does not "
            "make; false is allowed"
        )
    if trainer.grad_release:
        if not fused:
            asked, others = "trainer.grad_release=true", "trainer.grad_release=false"
            raise ConfigError(needs_fused(asked, config.optimizer._target_, others))
        for key, value, needed in (
            ("trainer.accumulate", trainer.accumulate, 1),
            ("trainer.max_grad_norm", trainer.max_grad_norm, None),
            ("optimizer.max_grad_norm", config.optimizer.get("max_grad_norm"), None),
            ("precision.loss_scaling", precision.loss_scaling, False),
        ):
            if value != needed:
                raise ConfigError(
                    f"trainer.grad_release=true needs {key}={spelled(needed)}, got {spelled(value)}"
                )


def needs_fused(asked: str, got: str, others: str) -> str:
    fused = options_with("optimizer", "master_weights")
    return f"{asked} needs a fused optimizer ({fused}), got {got}; with it, {others} is allowed"


def build(section: str, node: DictConfig, *arguments: Any) -> Any:
    """Call what a section of the config names; its refusal becomes one line naming the section."""
    try:
        return instantiate(node, _partial_=True)(*arguments)
    except (HydraException, ImportError, AttributeError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{section}: {error.__cause__ or error}") from error


def build_optimizer(config: DictConfig, model: nn.Module, device: torch.device) -> Any:
    """Weight decay is for matrices, not for norms and biases."""
    options = config.optimizer.copy()
    if device.type == "cuda" and "capturable" in options:
        options.capturable = True  # lr and step counts stay on the device
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = build("optimizer", options, groups)
    name = config.trainer.step_in_backward
    try:
        step_in_backward = instantiate({"_target_": name}, _partial_=True)
    except (HydraException, TypeError) as error:
        raise ConfigError(
            f"trainer.step_in_backward must be the full name of a function, got {spelled(name)}"
        ) from error
    if config.trainer.grad_release:
        try:
            step_in_backward(model, optimizer)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"trainer.grad_release: {error}") from error
    return optimizer


class Schedule:
    """The lr, linear up and a cosine down, as a device tensor that all groups share.

    It follows a count on the device and never asks for it: an update that the loss scaler skipped
    does not count, and the same few kernels run eagerly and inside a CUDA graph.
    """

    def __init__(self, optimizer: Any, trainer: Trainer, device: torch.device) -> None:
        base = optimizer.param_groups[0]["lr"]

        def value(update: int) -> float:
            if update < trainer.warmup_steps:
                return float(base * (update + 1) / (trainer.warmup_steps + 1))
            falling = max(1, trainer.steps - trainer.warmup_steps)
            cosine = (1 + math.cos(math.pi * (update - trainer.warmup_steps) / falling)) / 2
            return float(base * (trainer.final_lr + (1 - trainer.final_lr) * cosine))

        self.values = torch.tensor([value(i) for i in range(trainer.steps + 1)], device=device)
        self.updates = torch.zeros(1, dtype=torch.int64, device=device)
        self.lr = torch.zeros((), device=device)
        self.start(optimizer, 0)

    def start(self, optimizer: Any, updates: int) -> None:
        self.updates.fill_(min(updates, len(self.values) - 1))
        self.lr.copy_(self.values.index_select(0, self.updates).squeeze(0))
        for group in optimizer.param_groups:
            group["lr"] = self.lr

    def advance(self, skipped: Tensor | None) -> None:
        self.updates.add_(1 if skipped is None else ~skipped)
        self.lr.copy_(self.values.index_select(0, self.updates).squeeze(0))


class Clock:
    """Three marks in a step. Making one never waits for the device, reading them does."""

    def __init__(self, device: torch.device) -> None:
        self.times = [0.0] * 3
        self.events: list[torch.cuda.Event] = []
        if device.type == "cuda":  # external: a captured mark is made anew by each replay
            event = torch.cuda.Event
            self.events = [event(enable_timing=True, external=True) for _ in range(3)]  # type: ignore[no-untyped-call]

    def mark(self, index: int) -> None:
        self.times[index] = time.perf_counter()
        if self.events:
            self.events[index].record()

    def split_ms(self) -> tuple[float, float]:
        """Milliseconds of the latest step's forward and backward, and of its optimizer."""
        if self.events:
            first, middle, last = self.events
            last.synchronize()
            return first.elapsed_time(middle), middle.elapsed_time(last)
        first_time, middle_time, last_time = self.times
        return 1e3 * (middle_time - first_time), 1e3 * (last_time - middle_time)


class GradientPeak:
    """The most bytes that gradients held at once, seen by hooks that live for one step."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.bytes = 0
        self.hooks = [p.register_post_accumulate_grad_hook(self.look) for p in self.parameters]  # type: ignore[no-untyped-call]

    def look(self, _: Tensor) -> None:
        held = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        self.bytes = max(self.bytes, held)

    def close(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()


# ---------------------------------------------------------------------------- one step


def draw_offsets(run: Run) -> Tensor:
    """Where the next step's sequences start: a row for each micro-batch."""
    shape = (run.trainer.accumulate, run.trainer.batch_size)
    return torch.randint(len(run.train_bytes) - run.trainer.seq_len, shape, generator=run.sampler)


def mean_loss(run: Run, data: Tensor, offsets: Tensor) -> Tensor:
    """Cross-entropy of every next byte, in bits, over the sequences that start at `offsets`."""
    window = torch.arange(run.trainer.seq_len + 1, device=run.device)
    tokens = data[offsets[:, None] + window].long()
    with torch.autocast(run.device.type, run.autocast, enabled=run.autocast is not None):
        logits = run.predict(tokens[:, :-1])
    nats = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    return nats / math.log(2)


def train_step(run: Run, offsets: Tensor) -> Tensor:
    """One update; returns its loss and lr, on the device. Nothing in here waits for the device."""
    run.optimizer.zero_grad(set_to_none=True)
    run.clock.mark(0)
    loss, lr = torch.zeros((), device=run.device), run.schedule.lr.clone()
    for micro_batch in offsets.to(run.device):
        share = mean_loss(run, run.train_bytes, micro_batch) / len(offsets)
        run.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
        loss += share.detach()
    run.clock.mark(1)
    if run.clip is not None:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), run.clip)
    if not run.trainer.grad_release:  # else backward has stepped already
        run.scaler.step(run.optimizer)
    run.clock.mark(2)
    skipped = step_skipped(run)
    run.scaler.update()
    run.schedule.advance(skipped)
    return torch.stack((loss, lr))


def step_skipped(run: Run) -> Tensor | None:
    """Whether the scaler found an overflow and skipped; None where there is no scaler."""
    if not run.scaler.is_enabled():
        return None
    skipped = getattr(run.optimizer, "last_step_skipped", None)
    if skipped is None:  # a torch.optim optimizer: every public way to know waits for the device
        skipped = sum(run.scaler._found_inf_per_device(run.optimizer).values()) > 0
    return torch.as_tensor(skipped, device=run.device)


class GraphedStep:
    """`train_step` as one CUDA graph: eager at first, then captured once and replayed."""

    eager_steps = 3  # what is made lazily (states, kernels, workspaces) is made in these

    def __init__(self, run: Run) -> None:
        self.run = run
        self.calls = 0
        self.side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        shape = (run.trainer.accumulate, run.trainer.batch_size)
        self.offsets = torch.zeros(shape, dtype=torch.int64, device=run.device)  # the graph's input
        self.result = torch.empty(0)  # and its output

    def __call__(self, offsets: Tensor) -> Tensor:
        self.offsets.copy_(offsets)
        self.calls += 1
        if self.calls <= self.eager_steps:
            return self.step_aside()
        if self.calls == self.eager_steps + 1:
            self.capture()
        if self.graph is None:
            return train_step(self.run, self.offsets)
        self.graph.replay()
        return self.result.clone()

    def step_aside(self) -> Tensor:
        """An eager step on a stream other than the default one, as a capture needs before it."""
        main_stream = torch.cuda.current_stream()
        self.side_stream.wait_stream(main_stream)
        with torch.cuda.stream(self.side_stream):
            result = train_step(self.run, self.offsets)
        main_stream.wait_stream(self.side_stream)
        return result

    def capture(self) -> None:
        """Record a step without running it; where that cannot work, say why and stay eager."""
        run, stream = self.run, torch.cuda.current_stream()
        scaler_state = run.scaler.state_dict()
        run.optimizer.zero_grad(set_to_none=True)  # the gradients move into the graph's memory
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.result = train_step(run, self.offsets)
            self.graph = graph
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
            reason: BaseException = error
            while reason.__context__ is not None:
                reason = reason.__context__
            tqdm.write(f"trainer.cuda_graph: running eagerly, capture failed: {one_line(reason)}")
            run.scaler = torch.amp.GradScaler(run.device.type, enabled=run.scaler.is_enabled())
            run.scaler.load_state_dict(scaler_state)


# ---------------------------------------------------------------------------- the loop


def train(run: Run) -> str:
    """Step until the end or a Ctrl-C; returns how the steps ran."""
    trainer, on_gpu = run.trainer, run.device.type == "cuda"
    graphed = GraphedStep(run) if trainer.cuda_graph and on_gpu else None
    if trainer.cuda_graph and not on_gpu:
        tqdm.write(f"trainer.cuda_graph: running eagerly, {run.device} has no CUDA graphs")
    results: list[Tensor] = []  # of the steps since the last log, still on the device
    stopping = run.step >= trainer.steps
    write_metrics(run, run.rows, "w")
    with tqdm(total=trainer.steps, initial=run.step, unit="step") as bar, ctrl_c() as interrupted:
        since = time.perf_counter()
        while not stopping:
            offsets = draw_offsets(run)
            results.append(graphed(offsets) if graphed else train_step(run, offsets))
            run.step += 1
            run.gradients.close()
            done = run.step == trainer.steps
            stopping = done or interrupted.is_set()
            evaluating = done or due(run.step, trainer.eval_every)
            saving = stopping or due(run.step, trainer.checkpoint_every)
            if not (evaluating or saving or due(run.step, trainer.log_every)):
                continue
            rows = log(run, results, since)
            latest = rows[-1]
            loss, speed = latest["train_bits_per_byte"], latest["tokens_per_second"]
            bar.set_postfix_str(f"{loss:.3f} bits/byte, {speed:,.0f} tokens/s", refresh=False)
            bar.update(len(rows))
            if evaluating:
                latest["validation_bits_per_byte"] = loss = evaluate(run)
                bar.write(f"step {run.step}: validation {loss:.3f} bits/byte")
            write_metrics(run, rows, "a")
            if saving:
                save_checkpoint(run)
            results.clear()
            since = time.perf_counter()
    if run.step < trainer.steps:
        again = f"python {sys.argv[0]} resume={run.folder}"
        print(f"stopped and saved at step {run.step}; to go on: {again}", file=sys.stderr)
        sys.exit(130)
    return "one CUDA graph" if graphed and graphed.graph else "eager"


@contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """The first Ctrl-C lets the step in progress end and be saved; the second stops at once."""
    pressed = threading.Event()

    def note(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def log(run: Run, results: list[Tensor], since: float) -> list[dict[str, float]]:
    """A row for each step since the last log. Reading the results is where the host waits."""
    values = torch.stack(results).tolist()
    seconds = time.perf_counter() - since
    first = run.step - len(values) + 1
    rows: list[dict[str, float]] = [
        {"step": first + i, "lr": lr, "train_bits_per_byte": loss}
        for i, (loss, lr) in enumerate(values)
    ]
    trainer = run.trainer
    tokens = len(rows) * trainer.accumulate * trainer.batch_size * trainer.seq_len
    rows[-1]["tokens_per_second"] = tokens / seconds
    rows[-1]["forward_backward_ms"], rows[-1]["optimizer_ms"] = run.clock.split_ms()
    run.rows += rows
    return rows


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Bits per byte over evenly spaced validation windows, the same ones every time."""
    shape = (run.trainer.eval_batches, run.trainer.batch_size)
    last = len(run.validation_bytes) - run.trainer.seq_len - 1
    starts = torch.linspace(0, last, math.prod(shape), dtype=torch.float64).long().view(shape)
    losses = [mean_loss(run, run.validation_bytes, row) for row in starts.to(run.device)]
    return float(torch.stack(losses).mean())


def write_metrics(run: Run, rows: list[dict[str, float]], mode: str) -> None:
    """One row a step; what is measured only now and then is left empty in between."""
    columns = ["step", "lr", "train_bits_per_byte", "validation_bits_per_byte"]
    columns += ["tokens_per_second", "forward_backward_ms", "optimizer_ms"]
    with (run.folder / "metrics.csv").open(mode, newline="") as file:
        writer = csv.DictWriter(file, columns)
        if mode == "w":
            writer.writeheader()
        writer.writerows(rows)


# ---------------------------------------------------------------------------- checkpoints


def save_checkpoint(run: Run) -> None:
    """Whole or not at all: written beside the last one, then renamed over it."""
    content = {
        "step": run.step,
        "overrides": run.overrides,
        "rows": run.rows,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "updates": int(run.schedule.updates),
        "scaler": run.scaler.state_dict(),
        "sampler": run.sampler.get_state(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if run.device.type == "cuda" else None,
    }
    unfinished = run.folder / "checkpoint.pt.unfinished"
    with unfinished.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(run.folder / "checkpoint.pt")
    folder = os.open(run.folder, os.O_RDONLY)
    os.fsync(folder)  # so that the new name, too, outlives a power cut
    os.close(folder)


def load_checkpoint(where: str) -> dict[str, Any]:
    """`where` is a run's folder or the file in it, seen from where the command was given."""
    path = Path(to_absolute_path(where))
    path = path / "checkpoint.pt" if path.is_dir() else path
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        wanted = {"step", "overrides", "rows", "model", "optimizer", "updates", "scaler", "sampler"}
        missing = wanted - content.keys()
    except (OSError, EOFError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        reason = (
            error.strerror if isinstance(error, FileNotFoundError) else "not written by train.py"
        )
        raise ConfigError(
            f"resume must be a run's folder or its checkpoint.pt, got {path}: {reason}"
        ) from error
    if missing:
        raise ConfigError(f"resume: train.py did not write {path}, it has no {min(missing)}")
    return content


def restore(run: Run, content: dict[str, Any]) -> None:
    """Put a fresh run where the checkpoint was, bit for bit."""
    if content["step"] >= run.trainer.steps:
        raise ConfigError(
            f"resume: the checkpoint is at step {content['step']}, trainer.steps="
            f"{run.trainer.steps} leaves nothing to do; give trainer.steps > {content['step']}"
        )
    states = content["optimizer"]["state"].values()
    names = {name for state in states for name in state}
    if not hasattr(run.optimizer, "backend") and any("master" in n or "scale" in n for n in names):
        raise ConfigError(
            "resume: torch.optim cannot read the checkpoint's optimizer state; a fused optimizer "
            "is allowed"
        )
    settings = [dict(group) for group in run.optimizer.param_groups]
    try:
        run.model.load_state_dict(content["model"])
        run.optimizer.load_state_dict(content["optimizer"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"resume: the checkpoint does not fit this run: {error}") from error
    for group, built in zip(run.optimizer.param_groups, settings, strict=True):
        group.update({key: value for key, value in built.items() if key != "params"})
    run.schedule.start(run.optimizer, content["updates"])
    if run.scaler.is_enabled() and content["scaler"]:
        run.scaler.load_state_dict(content["scaler"])
    run.step = run.resumed_at = content["step"]
    run.rows = content["rows"]
    run.sampler.set_state(content["sampler"])
    torch.set_rng_state(content["random"])
    if run.device.type == "cuda" and content["random_cuda"] is not None:
        torch.cuda.set_rng_state(content["random_cuda"])


# ---------------------------------------------------------------------------- what it cost


def report(run: Run, how: str) -> float:
    """Print the final table and draw loss.png; returns the validation loss in bits per byte."""
    validation = [loss for _, loss in curve(run, "validation_bits_per_byte")]
    parameters = sum(p.numel() for p in run.model.parameters())
    state = state_bytes(run.optimizer)
    table = {
        "train loss": f"{run.rows[-1]['train_bits_per_byte']:.3f} bits/byte",
        "validation loss": f"{validation[-1]:.3f} bits/byte",
        "forward + backward": f"{median_after_first(run, 'forward_backward_ms'):.3f} ms a step",
        "optimizer": f"{median_after_first(run, 'optimizer_ms'):.3f} ms a step",
        "throughput": f"{median_after_first(run, 'tokens_per_second'):,.0f} tokens/s",
        "steps ran as": how,
        "optimizer backend": getattr(run.optimizer, "backend", "torch.optim") or "no step made",
        "parameters": f"{parameters:,}",
        "optimizer state": f"{sum(state.values()) / parameters:.3f} bytes a parameter",
        **{f"  {name}": f"{size / parameters:.3f}" for name, size in state.items()},
        "gradients, at most": f"{run.gradients.bytes / parameters:.3f} bytes a parameter",
    }
    if run.device.type == "cuda":
        table["peak memory"] = f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB of the GPU's"
        table["optimizer launches"] = "inside backward"
        if not run.trainer.grad_release:
            table["optimizer launches"] = f"{optimizer_launches(run)} a step"
    else:
        unit = 1 if sys.platform == "darwin" else 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        table["peak memory"] = f"{peak / 2**20:,.0f} MiB, the whole process"
    table["written to"] = str(run.folder)
    print("", *(f"{name:<20}{value}" for name, value in table.items()), sep="\n")
    draw_losses(run)
    return validation[-1]


def curve(run: Run, column: str) -> list[tuple[float, float]]:
    return [(row["step"], row[column]) for row in run.rows if column in row]


def median_after_first(run: Run, column: str) -> float:
    """Of what ran here, without the first of several values, which paid for start-up."""
    values = [value for step, value in curve(run, column) if step > run.resumed_at]
    return statistics.median(values[1:] or values)


def state_bytes(optimizer: torch.optim.Optimizer) -> Counter[str]:
    """Bytes of optimizer state by component: moments, their scales, masters, step counts."""
    sizes: Counter[str] = Counter()
    for state in optimizer.state.values():
        for name, value in state.items():
            sizes[name] += value.nbytes if isinstance(value, Tensor) else 0
    return sizes


def optimizer_launches(run: Run) -> int:
    """Kernel launches of one more optimizer.step(), counted by the profiler; nothing is saved."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run.optimizer.step()
        torch.cuda.synchronize()
    launches = ("cudaLaunchKernel", "cuLaunchKernel")
    return sum(event.count for event in profile.key_averages() if event.key.startswith(launches))


def draw_losses(run: Run) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train", "-"), ("validation", "o-")):
        axes.plot(*zip(*curve(run, f"{name}_bits_per_byte"), strict=True), style, label=name)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.savefig(run.folder / "loss.png", dpi=120)


# ---------------------------------------------------------------------------- the command line


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(config: DictConfig) -> float:
    """One run, from its settings to its table."""
    job = HydraConfig.get()
    with errors_in_one_line(job):
        overrides = {key_of(override): override for override in job.overrides.task}
        checkpoint = load_checkpoint(str(config.resume)) if config.resume is not None else None
        if checkpoint is not None:  # its settings, and over them those given now
            saved = {key_of(override): override for override in checkpoint["overrides"]}
            overrides = saved | overrides
            try:
                config = hydra.compose(job.job.config_name, list(overrides.values()))
                check_same_model(architecture(saved), architecture(overrides))
            except HydraException as error:
                kept = " ".join(saved.values())
                raise ConfigError(f"resume: {one_line(error)} (the run had: {kept})") from error
        overrides.pop("resume", None)
        if config.data.get("path"):  # a resumed run may start elsewhere
            absolute = to_absolute_path(str(config.data.path)).replace("'", "\\'")
            overrides["data.path"] = f"data.path='{absolute}'"
        run = Run(config, Path(job.runtime.output_dir), list(overrides.values()))
        if checkpoint is not None:
            restore(run, checkpoint)
        return report(run, train(run))


def architecture(overrides: dict[str, str]) -> dict[str, Any]:
    """The model's settings under their full keys, the chosen option first."""
    name = HydraConfig.get().job.config_name
    config = hydra.compose(name, list(overrides.values()), return_hydra_config=True)
    settings = {f"model.{key}": value for key, value in config.model.items()}
    return {"model": config.hydra.runtime.choices.model, **settings}


def check_same_model(had: dict[str, Any], got: dict[str, Any]) -> None:
    """A checkpoint's weights are those of one architecture."""
    different = [key for key in had | got if had.get(key) != got.get(key)]
    if different and different != ["model"]:
        key = different[0]
        raise ConfigError(f"resume: the run had {key}={had.get(key)}, got {key}={got.get(key)}")


def key_of(override: str) -> str:
    return override.lstrip("+~").split("=")[0]


@contextmanager
def errors_in_one_line(job: Any = None) -> Iterator[None]:
    """What the user got wrong becomes a line that says what is allowed, and exit code 2.

    The error of one job of several goes on: Hydra then runs the other jobs first.
    """
    try:
        yield
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        if job is not None:
            remove_if_unused(job)
        if job is not None and job.mode is RunMode.MULTIRUN:
            raise
        sys.exit(2)
    except KeyboardInterrupt:
        saved = job is not None and Path(job.runtime.output_dir, "checkpoint.pt").exists()
        kept = (
            "the run's folder keeps its last whole checkpoint.pt" if saved else "nothing is saved"
        )
        print(f"stopped; {kept}", file=sys.stderr)
        sys.exit(130)


def remove_if_unused(job: Any) -> None:
    """The folder of a refused run, unless more is in it than Hydra's record of the call."""
    folder, log = Path(job.runtime.output_dir), f"{job.job.name}.log"
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder == Path(job.runtime.cwd) or not names or not names <= {log, job.output_subdir}:
        return
    if log not in names or not (folder / log).stat().st_size:
        shutil.rmtree(folder)


def one_line(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options:
        wanted = str(error.missing_cfg_file).replace("/", "=")
        return f"there is no {wanted}; allowed: {', '.join(error.options)}"
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        allowed = [str(key) for key in cause.parent_node if not str(key).startswith("_")]
        group, _, key = str(cause.full_key).partition(".")
        elsewhere = options_with(group, key)
        hints = [f"allowed: {', '.join(allowed)}"] if allowed else []
        hints += [f"it belongs to {elsewhere}"] if elsewhere else []
        return "; ".join([f"there is no {cause.full_key}", *hints])
    return " ".join(str(error).split())


def command_line() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises, rather than print at length
    with errors_in_one_line():
        main()


if __name__ == "__main__":
    sys.modules["train"] = sys.modules["__main__"]  # conf/ names train.GPT: no second copy of it
    command_line()
