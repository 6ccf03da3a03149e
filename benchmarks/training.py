"""What a training step costs with each optimizer: `python benchmarks/training.py`.

train.py trains gpt_small with bf16 matmuls, eagerly and as one CUDA graph. Each run is a process of
its own, of which the later half of the steps counts.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What trains: overrides of train.py, and the module that must be there.
MODES = {
    "torch AdamW fused, fp32 weights": (["optimizer=torch_adamw", "precision=bf16_amp"], "torch"),
    "FusedAdam, fp32 weights": (["optimizer=fused_adam", "precision=bf16_amp"], "torch"),
    "FusedAdam, bf16 weights, fp32 master": (["optimizer=fused_adam", "precision=bf16"], "torch"),
    "FusedAdam, lean": (["optimizer=fused_adam", "precision=lean"], "torch"),
    "optimi AdamW, fp32 weights": (
        ["optimizer=torch_adamw", "optimizer._target_=optimi.AdamW", "precision=bf16_amp"],
        "optimi",
    ),
}
COLUMNS = ("forward_backward_ms", "optimizer_ms", "tokens_per_second")


def median_of(folder: Path) -> dict[str, float]:
    """Medians of the later half of a run's measured steps."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(COLUMNS[0])]
    return {c: statistics.median(float(row[c]) for row in rows[len(rows) // 2 :]) for c in COLUMNS}


def train(overrides: list[str], options: argparse.Namespace) -> dict[str, float] | str:
    """Medians of one run, or the last line of what it said instead."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            f"hydra.run.dir={folder}",
            f"model={options.model}",
            f"trainer.steps={options.steps}",
            f"trainer.batch_size={options.batch_size}",
            f"trainer.seq_len={options.seq_len}",
            "trainer.log_every=10",
            "trainer.eval_every=0",
            "trainer.eval_batches=1",
            "trainer.checkpoint_every=0",
            "trainer.max_grad_norm=null",
            *overrides,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1][:120]
        return median_of(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="gpt_small")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--eager-only", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    options = parser.parse_args()
    lines = [
        f"{options.model}, {options.batch_size} x {options.seq_len} bytes a step\n",
        "| | steps run as | forward + backward ms | optimizer ms | share of the step | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for graph in ("false",) if options.eager_only else ("false", "true"):
        for name, (overrides, module) in MODES.items():
            if importlib.util.find_spec(module) is None:
                print(f"not installed, so not compared: {module}", flush=True)
                continue
            cost = train([*overrides, f"trainer.cuda_graph={graph}"], options)
            kind = "one CUDA graph" if graph == "true" else "eager"
            if isinstance(cost, str):
                lines.append(f"| {name} | {kind} | {cost} | | | |")
            else:
                backward, optimizer, tokens = (cost[column] for column in COLUMNS)
                share = optimizer / (backward + optimizer)
                lines.append(
                    f"| {name} | {kind} | {backward:.2f} | {optimizer:.2f} | {share:.1%} "
                    f"| {tokens:,.0f} |"
                )
            print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "training.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
