"""Whether narrow states train as well as fp32 ones: train.py in several modes and seeds.

`python benchmarks/convergence.py` trains gpt_small on the standard library's text, several runs
at a time on one GPU. Finished runs are kept: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import csv
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# All of them train bf16 weights, so that only what the optimizer keeps differs.
MODES = {
    "fp32": ["precision=bf16"],
    "bf16": ["precision=bf16", "precision.state_dtype=bf16"],
    "fp16": ["precision=bf16", "precision.state_dtype=fp16"],
    "fp8-remainders": ["precision=lean"],
    "fp8-24bit": [
        "precision=lean",
        "precision.store_param_remainders=false",
        "optimizer.master_weight_bits=24",
    ],
}


@dataclass
class Job:
    """One run of train.py, in a folder of its own."""

    mode: str
    seed: int
    folder: Path

    def command(self, options: argparse.Namespace) -> list[str]:
        start = [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={self.folder}"]
        if (self.folder / "checkpoint.pt").exists():
            return [*start, f"resume={self.folder}"]
        return [
            *start,
            f"model={options.model}",
            f"seed={self.seed}",
            "optimizer=fused_adam",
            f"optimizer.lr={options.lr}",
            *MODES[self.mode],
            f"trainer.steps={options.steps}",
            f"trainer.batch_size={options.batch_size}",
            f"trainer.seq_len={options.seq_len}",
            "trainer.warmup_steps=100",
            "trainer.max_grad_norm=1.0",
            "trainer.log_every=50",
            f"trainer.eval_every={max(1, options.steps // 8)}",
            "trainer.checkpoint_every=0",
            "trainer.cuda_graph=true",
            *options.override,
        ]

    def curve(self, column: str) -> list[tuple[int, float]]:
        path = self.folder / "metrics.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get(column)]
        return [(int(row["step"]), float(row[column])) for row in rows]

    def final(self, steps: int) -> float | None:
        """Validation loss of the last step, if the run got there."""
        points = self.curve("validation_bits_per_byte")
        return points[-1][1] if points and points[-1][0] == steps else None


def run_all(jobs: list[Job], options: argparse.Namespace) -> None:
    """Run what is not finished, some at a time, until done or out of time."""
    deadline = time.monotonic() + options.max_seconds
    waiting = [job for job in jobs if job.final(options.steps) is None]
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
    while waiting or running:
        while waiting and len(running) < options.jobs and time.monotonic() < deadline:
            job = waiting.pop(0)
            job.folder.mkdir(parents=True, exist_ok=True)
            with (job.folder / "output.txt").open("ab") as log:
                process = subprocess.Popen(
                    job.command(options), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
                )
            running.append((job, process, time.monotonic()))
        if time.monotonic() > deadline:
            for _, process, _ in running:  # train.py saves a checkpoint and stops
                process.send_signal(signal.SIGINT)
            for _, process, _ in running:
                process.wait()
            print(f"out of time: {len(waiting) + len(running)} runs are not finished", flush=True)
            return
        time.sleep(0.2)
        for entry in [entry for entry in running if entry[1].poll() is not None]:
            running.remove(entry)
            job, process, since = entry
            loss = job.final(options.steps)
            seconds = time.monotonic() - since
            if loss is None:
                print(
                    f"{job.mode} seed {job.seed}: failed, see {job.folder}/output.txt", flush=True
                )
                continue
            (job.folder / "checkpoint.pt").unlink(missing_ok=True)  # 0.5 to 1.5 GB each
            print(f"{job.mode} seed {job.seed}: {loss:.4f} after {seconds:.0f} s", flush=True)


def markdown(jobs: list[Job], options: argparse.Namespace) -> str:
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    size = f"{options.steps} steps of {options.batch_size} x {options.seq_len} bytes"
    lines = [
        f"{options.model}, {size}: final validation loss, bits per byte\n",
        f"| states | {' | '.join(seeds)} | mean | against fp32 | within fp32's spread |",
        "|" + "---|" * (len(seeds) + 4),
    ]
    finals = {
        mode: [job.final(options.steps) for job in jobs if job.mode == mode]
        for mode in options.modes
    }
    complete = {
        mode: [loss for loss in losses if loss is not None] for mode, losses in finals.items()
    }
    baseline = complete.get("fp32", [])
    for mode, losses in finals.items():
        cells = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
        cells += ["-", "-", "-"]
        if complete[mode]:
            cells[-3] = f"{statistics.mean(complete[mode]):.4f}"
        if complete[mode] and len(baseline) > 1:
            off = statistics.mean(complete[mode]) - statistics.mean(baseline)
            spread = max(baseline) - min(baseline)
            cells[-2:] = [f"{off:+.4f}", f"{spread:.4f} {'ok' if abs(off) <= spread else 'MISS'}"]
        lines.append("| " + " | ".join([mode, *cells]) + " |")
    return "\n".join(lines) + "\n"


def draw(jobs: list[Job], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    modes = list(dict.fromkeys(job.mode for job in jobs))
    for job in jobs:
        color = f"C{modes.index(job.mode)}"
        label = job.mode if job.seed == 0 else None
        train, validation = job.curve("train_bits_per_byte"), job.curve("validation_bits_per_byte")
        if train and validation:
            window = max(1, len(train) // 40)
            smooth = [
                (train[i][0], statistics.mean(loss for _, loss in train[i : i + window]))
                for i in range(0, len(train), window)
            ]
            left.plot(*zip(*smooth, strict=True), color=color, label=label, lw=0.8)
            right.plot(*zip(*validation, strict=True), "o-", color=color, label=label, lw=0.8)
    left.set(xlabel="step", ylabel="training loss, bits per byte")
    right.set(xlabel="step", ylabel="validation loss, bits per byte")
    if right.lines:
        right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="gpt_small")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--override", nargs="*", default=[], help="more overrides for train.py")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    options = parser.parse_args()
    folder = (options.out / "convergence").resolve()
    # Seeds outermost: cut short, it has compared every mode at the first seeds.
    jobs = [
        Job(mode, seed, folder / f"{options.model}-{options.steps}-{mode}-{seed}")
        for seed in range(options.seeds)
        for mode in options.modes
    ]
    start = time.monotonic()
    run_all(jobs, options)
    text = markdown(jobs, options)
    (options.out / "convergence.md").write_text(text)
    draw(jobs, options.out / "convergence.png")
    print(f"{text}\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
