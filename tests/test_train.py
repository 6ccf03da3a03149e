"""train.py from outside: its settings, its errors, its files, and what a stopped run leaves."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

import train

ROOT = Path(train.__file__).resolve().parent
CONF = ROOT / "conf"
SMALL = [
    "device=cpu",
    "data=text",
    "trainer.steps=4",
    "trainer.batch_size=2",
    "trainer.seq_len=16",
    "trainer.warmup_steps=2",
    "trainer.eval_batches=2",
    "trainer.log_every=1",
]
SMALL_MODEL = {
    "mlp": ["model.width=16"],
    "gpt_nano": ["model.layers=1", "model.width=16", "model.heads=2"],
    "gpt_small": ["model.layers=1", "model.width=16", "model.heads=2", "model.vocab_size=256"],
}
FUSED = ["fused_adam", "fused_sgd", "fused_lion"]
TORCH = ["torch_adamw", "torch_sgd"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"".join(b"line %d says %d\n" % (i, i * i % 97) for i in range(2000)))
    return path


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path) -> Any:
    """The command line in this process: returns the exit code."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")

    def run(folder: str, *overrides: str, small: list[str] = SMALL) -> int:
        chosen = next((o.split("=")[1] for o in overrides if o.startswith("model=")), "mlp")
        defaults = {train.key_of(o): o for o in [*small, f"model={chosen}"]}
        if "data=text" in small and "data=stdlib" not in overrides:
            defaults["data.path"] = f"data.path={corpus}"
        if not any(o.startswith(("resume=", "experiment=")) for o in overrides):
            defaults |= {train.key_of(o): o for o in SMALL_MODEL.get(chosen, [])}
        settings = defaults | {train.key_of(o): o for o in overrides}
        arguments = [f"hydra.run.dir={tmp_path / folder}", *settings.values()]
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return exit_code()

    return run


def exit_code() -> int:
    try:
        train.command_line()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def settings(*overrides: str) -> Any:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", [*SMALL, "model=mlp", "model.width=16", *overrides])


def checkpoint(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return content


def flat(value: Any) -> Any:
    """Tensors as dtype and bytes, so that == is bit for bit; what a clock says is left out."""
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            value.shape,
            value.cpu().contiguous().flatten().view(torch.uint8).tolist(),
        )
    if isinstance(value, dict):
        clocks = {"tokens_per_second", "forward_backward_ms", "optimizer_ms"}
        return {key: flat(item) for key, item in value.items() if key not in clocks}
    return [flat(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---------------------------------------------------------------------------- settings


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group in GROUPS for option in options(group)]
)
def test_every_option_trains(
    group: str, option: str, launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"{group}={option}"]
    if group == "experiment":
        overrides += SMALL_MODEL["gpt_small" if "gpt_small" in option else "mlp"]
        small = [o for o in SMALL if not o.startswith("data")]
        text = (CONF / "experiment" / f"{option}.yaml").read_text()
        model = text.split("/model: ")[1].split()[0]
        assert launch("run", *overrides, f"model={model}", small=small) == 0
    else:
        assert launch("run", *overrides) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert all(math.isfinite(float(row["train_bits_per_byte"])) for row in rows)
    assert math.isfinite(float(rows[-1]["validation_bits_per_byte"]))
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoint(tmp_path / "run")["step"] == 4
    table = capsys.readouterr().out
    for line in ("validation loss", "forward + backward", "optimizer state", "optimizer backend"):
        assert line in table


@pytest.mark.parametrize("precision", options("precision"))
@pytest.mark.parametrize("optimizer", FUSED)
def test_every_fused_optimizer_in_every_precision(
    optimizer: str,
    precision: str,
    launch: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table says where the bytes are."""
    assert launch("run", f"optimizer={optimizer}", f"precision={precision}") == 0
    printed = capsys.readouterr().out
    for name, value in checkpoint(tmp_path / "run")["optimizer"]["state"][0].items():
        said = re.search(rf"(?m)^  {name} +([0-9.]+)$", printed)
        assert said is not None, name
        assert value.numel() == 1 or float(said[1]) > 0


@pytest.mark.parametrize("optimizer", options("optimizer"))
def test_optimizer_gets_plain_values_in_signature_order(optimizer: str) -> None:
    """A ListConfig in param_groups would make checkpoints unloadable with weights_only."""
    import inspect

    node = settings(f"optimizer={optimizer}").optimizer
    built = instantiate(node, lr=0.5)([torch.nn.Parameter(torch.ones(2, 2))])
    assert not any(OmegaConf.is_config(value) for value in built.param_groups[0].values())
    names = [name for name in inspect.signature(type(built)).parameters if name != "params"]
    given = [name for name in node if not name.startswith("_")]
    assert given == [name for name in names if name in given]
    if optimizer in FUSED:
        assert given == names


def test_gpt_small_is_gpt2() -> None:
    with torch.device("meta"):
        model = instantiate(settings("model=gpt_small", "model.width=768").model)
    assert len(list(model.parameters())) == 148
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


@pytest.mark.parametrize("model", ["gpt_nano", "mlp"])
def test_models_never_look_ahead(model: str) -> None:
    node = settings(f"model={model}", "model.width=16").model
    built = instantiate(node)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] ^= 1
    same = (built(tokens) == built(changed)).all(-1)[0]
    assert same.tolist() == [True] * 9 + [False] * 7


def test_split_by_file(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 10)
    training, validation = train.text(str(tmp_path))
    assert sorted(set(validation.tolist())) == [9, 19]
    assert sorted(set(training.tolist())) == [i for i in range(20) if i not in (9, 19)]
    (by_glob, _), (of_one, rest) = train.text(f"{tmp_path}/0*"), train.text(f"{tmp_path}/00.txt")
    assert (len(by_glob), len(of_one)) == (90, 9)
    assert len(rest) == 1


# ---------------------------------------------------------------------------- errors

ERRORS = [
    (
        ["optimizer.use_decoupled_grad=true"],
        ["optimizer.use_decoupled_grad=true", "false is allowed"],
    ),
    (["optimizer.exp_avg_dtype=fp7"], ["fp7", "fp8_e5m2", "bf16"]),
    (["optimizer.exp_avg_dtyp=fp8"], ["optimizer.exp_avg_dtyp", "exp_avg_sq_dtype"]),
    (["optimizer=unknown"], ["unknown", "fused_adam", "torch_sgd"]),
    (["optimizr=fused_adam"], ["optimizr", "optimizer"]),
    (["optimizer._target_=fusedopt.FusedNothing"], ["FusedNothing"]),
    (["optimizer.betas=[0.9,2]"], ["beta", "2"]),
    (["trainer.steps=-5"], ["trainer.steps", ">= 1", "-5"]),
    (["trainer.steps=many"], ["trainer.steps", ">= 1", "many"]),
    (["trainer.log_every=0"], ["trainer.log_every", ">= 1"]),
    (["trainer.final_lr=2"], ["trainer.final_lr", "[0, 1]"]),
    (["trainer.max_grad_norm=-1"], ["trainer.max_grad_norm", "> 0"]),
    (["trainer.step_in_backward=foo.bar"], ["trainer.step_in_backward", "foo.bar"]),
    (["trainer.step_in_backward=null"], ["trainer.step_in_backward", "null"]),
    (["trainer.cuda_graph=maybe"], ["trainer.cuda_graph", "true or false"]),
    (["trainer.stepz=5"], ["trainer.stepz", "steps", "cuda_graph"]),
    (["+trainer.stepz=5"], ["trainer.stepz", "steps", "cuda_graph"]),
    (["trainer.steps=null"], ["trainer.steps", ">= 1", "got null"]),
    (["data=stdlib", "data.path=x"], ["data.path", "data=text"]),
    (["optimizer.momentum=0.5"], ["optimizer=fused_sgd, torch_sgd"]),
    (["data.path=/no/such/place"], ["/no/such/place", "file, a folder or a glob"]),
    (["data.path=null"], ["data.path", "file, a folder or a glob"]),
    (["trainer.seq_len=100000000"], ["trainer.seq_len", "training and the validation text"]),
    (["model=gpt_nano", "model.heads=3"], ["multiple of heads", "3"]),
    (["model=gpt_nano", "model.context=4"], ["trainer.seq_len", "<= 4", "got 16"]),
    (["device=cuda:99"], ["device", "cuda:99", "cpu"]),
    (["optimizer=torch_adamw", "precision=bf16"], ["precision.master_weights", "fp32, bf16_amp"]),
    (["optimizer=torch_sgd", "precision=lean"], ["store_param_remainders", "fp32, bf16_amp"]),
    (["precision.param_dtype=fp64"], ["precision.param_dtype", "fp32", "bf16"]),
    (["precision.autocast=fp8"], ["precision.autocast", "fp16, null", '"fp8"']),
    (["precision.loss_scaling=maybe"], ["precision.loss_scaling", "true or false", "maybe"]),
    (
        ["optimizer=torch_adamw", "trainer.grad_release=true"],
        ["trainer.grad_release=true", "torch.optim.AdamW", "fused_adam, fused_lion, fused_sgd"],
    ),
    (["trainer.grad_release=true", "trainer.accumulate=2"], ["trainer.accumulate=1, got 2"]),
    (["trainer.grad_release=true", "trainer.max_grad_norm=3"], ["max_grad_norm=null, got 3"]),
    (["trainer.grad_release=true", "optimizer.max_grad_norm=3"], ["max_grad_norm=null, got 3"]),
    (["trainer.grad_release=true", "precision=fp16"], ["precision.loss_scaling=false, got true"]),
    (["resume=/no/such/run"], ["resume", "/no/such/run"]),
    (["seed=99999999999999999999999"], ["seed", "2**63"]),
    (["model=gpt_nano", "model.heads=0"], ["model", "heads", ">= 1", "0"]),
    (["model=gpt_nano", "model.layers=-1"], ["model", "layers", ">= 1", "-1"]),
    (["model=gpt_nano", "model.vocab_size=16"], ["model", "vocab_size", ">= 256", "16"]),
    (["model.width=-4"], ["model", "width", ">= 1", "-4"]),
    (["model.width=abc"], ["model", "width", ">= 1", "abc"]),
]


@pytest.mark.parametrize(("overrides", "said"), ERRORS, ids=[" ".join(e[0]) for e in ERRORS])
def test_a_wrong_setting_is_one_line(
    overrides: list[str],
    said: list[str],
    launch: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch("run", *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert all(part in error for part in said), error
    assert "_target_" not in error
    assert not (tmp_path / "run").exists()


def test_a_refused_run_removes_no_file(launch: Any, corpus: Path, tmp_path: Path) -> None:
    assert launch(".", "seed=-1") == 2
    assert corpus.exists()
    assert launch("run", "optimizer=torch_adamw") == 0
    assert launch("run", "seed=-1") == 2
    assert checkpoint(tmp_path / "run")["step"] == 4


def test_resume_from_something_else(
    launch: Any, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"step": 1}, tmp_path / "other.pt")
    assert launch("run", f"resume={tmp_path / 'other.pt'}") == 2
    assert launch("run", f"resume={corpus}") == 2
    assert launch("run", "optimizer=torch_adamw") == 0
    capsys.readouterr()
    for change in ("model=gpt_nano", "model.width=32"):
        assert launch("again", f"resume={tmp_path / 'run'}", change, "trainer.steps=9") == 2
        had = {"model=gpt_nano": "model=mlp", "model.width=32": "model.width=16"}[change]
        error = capsys.readouterr().err
        assert error == f"error: resume: the run had {had}, got {change}\n"
    assert launch("lean", "optimizer.exp_avg_dtype=fp8") == 0
    capsys.readouterr()
    assert launch("again", f"resume={tmp_path / 'lean'}", "optimizer=fused_sgd") == 2
    assert "(the run had: " in capsys.readouterr().err
    assert launch("again", f"resume={tmp_path / 'run'}", "optimizer=torch_adamw") == 2
    error = capsys.readouterr().err
    assert "give trainer.steps > 4" in error
    for content in (b"", b"no checkpoint", (tmp_path / "run" / "checkpoint.pt").read_bytes()[:999]):
        (tmp_path / "other.pt").write_bytes(content)
        assert launch("again", f"resume={tmp_path / 'other.pt'}") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: resume must be a run's folder or its checkpoint.pt, got /")
        assert len(error) < 300
        assert error.count("\n") == 1


def test_torch_cannot_go_on_from_a_low_bit_state(
    launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("run", "precision=lean") == 0
    capsys.readouterr()
    more = ["trainer.steps=60", "optimizer=torch_adamw", "precision=fp32"]
    assert launch("again", f"resume={tmp_path / 'run'}", *more) == 2
    assert "torch.optim cannot read the checkpoint's optimizer state" in capsys.readouterr().err


# ---------------------------------------------------------------------------- stop and go on


def test_a_relative_path_of_data_is_remembered(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "it's a home"
    home.mkdir()
    (home / "own.txt").write_bytes(b"line of text\n" * 99)
    monkeypatch.chdir(home)
    assert launch("first", "data.path=own.txt", "trainer.steps=2") == 0
    monkeypatch.chdir(tmp_path)
    more = [f"hydra.run.dir={tmp_path}/rest", f"resume={tmp_path}/first", "trainer.steps=4"]
    monkeypatch.setattr(sys, "argv", ["train.py", *more])
    assert exit_code() == 0
    assert checkpoint(tmp_path / "rest")["step"] == 4


def test_stopped_before_anything_is_saved(
    launch: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "build_optimizer", stop)
    assert launch("none") == 130
    assert "stopped; nothing is saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer=torch_adamw", "trainer.max_grad_norm=0.5", "trainer.accumulate=2"],
        ["optimizer=torch_adamw", "precision=fp16"],
        ["optimizer=torch_sgd", "model=gpt_nano"],
        ["optimizer=fused_adam", "trainer.max_grad_norm=0.5"],
        ["optimizer=fused_adam", "precision=fp16"],
        ["optimizer=fused_adam", "precision=bf16"],
        ["optimizer=fused_adam", "precision=lean", "model=gpt_nano", "model.width=64"],
        ["optimizer=fused_sgd", "precision=lean"],
        ["optimizer=fused_lion", "precision=lean"],
    ],
    ids=" ".join,
)
def test_resume_equals_never_having_stopped(
    overrides: list[str],
    launch: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch("whole", *overrides, "trainer.steps=7") == 0
    step = train.train_step

    def step_then_ctrl_c(run: Any, offsets: torch.Tensor) -> torch.Tensor:
        if run.step == 2:
            signal.raise_signal(signal.SIGINT)
        return step(run, offsets)

    monkeypatch.setattr(train, "train_step", step_then_ctrl_c)
    assert launch("part", *overrides, "trainer.steps=7") == 130
    monkeypatch.setattr(train, "train_step", step)
    assert f"resume={tmp_path / 'part'}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert checkpoint(tmp_path / "part")["step"] == 3
    # nothing but `resume` is needed: the checkpoint knows the run's other settings
    monkeypatch.setattr(
        sys, "argv", ["train.py", f"hydra.run.dir={tmp_path}/rest", f"resume={tmp_path}/part"]
    )
    assert exit_code() == 0
    whole, rest = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "rest")
    for key in whole:
        assert flat(whole[key]) == flat(rest[key]), key


KILLED = """
import io, sys, time, torch, train
whole_save = torch.save
def slow_save(content, file):
    buffer = io.BytesIO()
    whole_save(content, buffer)
    data = buffer.getvalue()
    if content["step"] < 3:
        file.write(data)
        return
    file.write(data[: len(data) // 2])
    file.flush()
    print("HALF", flush=True)
    time.sleep(600)
torch.save = slow_save
train.command_line()
"""


def test_kill_while_a_checkpoint_is_written(launch: Any, corpus: Path, tmp_path: Path) -> None:
    overrides = [*SMALL, "model=mlp", "optimizer=torch_adamw", "trainer.checkpoint_every=1"]
    assert launch("whole", "optimizer=torch_adamw", "trainer.checkpoint_every=1") == 0
    overrides += [f"data.path={corpus}", "model.width=16", f"hydra.run.dir={tmp_path}/killed"]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdout is not None
    assert any("HALF" in line for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (tmp_path / "killed" / "checkpoint.pt.unfinished").exists()
    assert checkpoint(tmp_path / "killed")["step"] == 2
    assert launch("rest", f"resume={tmp_path}/killed/checkpoint.pt") == 0
    whole, rest = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "rest")
    for key in ("model", "optimizer", "rows", "sampler"):
        assert flat(whole[key]) == flat(rest[key]), key


def test_the_last_lr_and_steps_can_be_changed_on_resume(launch: Any, tmp_path: Path) -> None:
    assert launch("run", "optimizer=torch_adamw") == 0
    more = ["trainer.steps=6", "optimizer.lr=0.5"]
    assert launch("more", f"resume={tmp_path / 'run'}", "optimizer=torch_adamw", *more) == 0
    content = checkpoint(tmp_path / "more")
    assert content["step"] == 6
    assert content["rows"][-1]["lr"] > 0.05


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments, *SMALL, "model=mlp"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_folders(chdir: str, corpus: Path, tmp_path: Path) -> None:
    """From another folder, with relative paths: files land in the run's own folder alone."""
    overrides = [f"hydra.job.chdir={chdir}", "hydra.run.dir=out", f"data.path={corpus.name}"]
    done = command(*overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"metrics.csv", "loss.png", "checkpoint.pt"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }
    assert {p.name for p in tmp_path.iterdir()} == {"out", corpus.name}


def test_multirun(corpus: Path, tmp_path: Path) -> None:
    sweep = ["--multirun", "hydra.sweep.dir=sweep", "optimizer=fused_adam,torch_adamw", "seed=0,1"]
    done = command(*sweep, f"data.path={corpus.name}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / "sweep" / str(i) for i in range(4)]
    losses = [checkpoint(folder)["rows"][-1]["train_bits_per_byte"] for folder in folders]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert losses[1] == pytest.approx(losses[3], rel=1e-5)


def test_a_wrong_job_stops_no_other(corpus: Path, tmp_path: Path) -> None:
    sweep = ["--multirun", "hydra.sweep.dir=sweep", "optimizer.lr=1e-3,-1,2e-3"]
    done = command(*sweep, f"data.path={corpus.name}", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: optimizer: lr must be finite and at least 0, got -1" in done.stderr
    for i in (0, 2):
        assert (tmp_path / "sweep" / str(i) / "checkpoint.pt").exists()


# ---------------------------------------------------------------------------- one step


@pytest.mark.parametrize("optimizer", FUSED + TORCH)
def test_schedule_waits_for_a_skipped_step(
    optimizer: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(f"optimizer={optimizer}", "precision=fp16", f"data.path={corpus}")
    run = train.Run(config, tmp_path, [])
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    mean_loss, overflows = train.mean_loss, [True, False, True, False]
    monkeypatch.setattr(
        train, "mean_loss", lambda *args: mean_loss(*args) * (math.inf if overflows[0] else 1)
    )
    scales, lrs = [], []
    while overflows:
        before = [p.detach().clone() for p in run.model.parameters()]
        lrs.append(train.train_step(run, train.draw_offsets(run))[1].item())
        same = [torch.equal(b, p) for b, p in zip(before, run.model.parameters(), strict=True)]
        assert all(same) if overflows[0] else not any(same)
        scales.append(run.scaler.get_scale())
        overflows.pop(0)
    assert scales == [1.0, 1.0, 0.5, 0.5]
    assert int(run.schedule.updates) == 2
    assert lrs[0] == lrs[1] < lrs[2] == lrs[3]
    assert run.scaler.state_dict()["_growth_tracker"] == 1


def test_schedule_rises_then_falls(corpus: Path, tmp_path: Path) -> None:
    overrides = ["trainer.steps=12", "trainer.warmup_steps=3", "trainer.final_lr=0.1"]
    config = settings(*overrides, "optimizer=torch_sgd", "optimizer.lr=1", f"data.path={corpus}")
    run = train.Run(config, tmp_path, [])
    lrs = [train.train_step(run, train.draw_offsets(run))[1].item() for _ in range(12)]
    assert lrs[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert lrs[3:] == sorted(lrs[3:], reverse=True)
    assert run.schedule.lr.item() == pytest.approx(0.1)
    assert all(group["lr"] is run.schedule.lr for group in run.optimizer.param_groups)


@pytest.mark.parametrize("optimizer", ["torch_sgd", "fused_adam"])
def test_accumulation_is_one_larger_batch(optimizer: str, corpus: Path, tmp_path: Path) -> None:
    weights = []
    for batch, micro in ((8, 1), (2, 4)):
        sizes = [f"trainer.batch_size={batch}", f"trainer.accumulate={micro}"]
        config = settings(
            f"optimizer={optimizer}", "optimizer.lr=1e-2", *sizes, f"data.path={corpus}"
        )
        run = train.Run(config, tmp_path, [])
        offsets = torch.arange(8).view(micro, batch)
        losses = [train.train_step(run, offsets) for _ in range(2)]
        weights.append((torch.cat([p.flatten() for p in run.model.parameters()]), losses[-1]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", FUSED)
def test_gradient_release_changes_nothing(optimizer: str, launch: Any, tmp_path: Path) -> None:
    assert launch("plain", f"optimizer={optimizer}") == 0
    assert launch("released", f"optimizer={optimizer}", "trainer.grad_release=true") == 0
    plain, released = checkpoint(tmp_path / "plain"), checkpoint(tmp_path / "released")
    for key in ("model", "rows"):
        assert flat(plain[key]) == flat(released[key])


def test_cuda_graph_on_a_cpu_says_why(launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("run", "optimizer=torch_adamw", "trainer.cuda_graph=true") == 0
    printed = capsys.readouterr()
    said = [
        line for line in (printed.out + printed.err).splitlines() if "trainer.cuda_graph" in line
    ]
    assert len(said) == 1
    assert "running eagerly" in said[0]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", options("precision"))
@pytest.mark.parametrize("optimizer", [*FUSED, "torch_adamw"])  # torch's SGD asks for its lr
def test_cuda_graph_equals_eager(
    optimizer: str, precision: str, launch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if optimizer == "torch_adamw" and precision in ("bf16", "lean"):
        pytest.skip("torch.optim has no master weights")
    shared = [f"optimizer={optimizer}", f"precision={precision}", "device=cuda", "trainer.steps=8"]
    assert launch("eager", *shared) == 0
    capsys.readouterr()
    assert launch("graph", *shared, "trainer.cuda_graph=true") == 0
    assert "one CUDA graph" in capsys.readouterr().out
    eager, graph = checkpoint(tmp_path / "eager"), checkpoint(tmp_path / "graph")
    assert [row["lr"] for row in eager["rows"]] == [row["lr"] for row in graph["rows"]]
    losses = [[row["train_bits_per_byte"] for row in run["rows"]] for run in (eager, graph)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---------------------------------------------------------------------------- README.md


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python snippets in order, in one interpreter."""
    text = (ROOT / "README.md").read_text()
    snippets = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    assert len(snippets) == text.count("```python") > 0
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet, names)
    assert names["w"].decoupled_grad.isfinite().all()


@pytest.mark.slow
def test_the_default_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", f"hydra.run.dir={tmp_path / 'run'}", "device=cpu"]
    )
    assert exit_code() == 0
    assert checkpoint(tmp_path / "run")["rows"][-1]["validation_bits_per_byte"] <= 3.0
