"""How well narrow states follow exact ones, through the real optimizer, beside an fp64 reference.

`python benchmarks/fidelity.py`. The gradients shrink a hundredfold over the run, so that a state
that cannot move by small amounts freezes, and their scales differ within a block.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fusedopt

BETA1 = 0.9
DTYPES = ("fp32", "bf16", "fp16", "fp8", "fp8_e5m2")


class Problem:
    """Gradients of a run, the same for every dtype."""

    def __init__(self, count: int, steps: int, spread: float, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        self.steps = steps
        self.generator = generator
        self.scales = (torch.randn(count, generator=generator, device=device) * spread).exp()

    def gradient(self, step: int) -> Tensor:
        noise = torch.randn(self.scales.shape, generator=self.generator, device=self.scales.device)
        shrunk: float = 0.01 ** (step / self.steps)
        return noise * self.scales * shrunk


def run(problem: Problem, beta2: float) -> list[dict[str, Any]]:
    """One pass over the gradients, all dtypes side by side."""
    optimizers: dict[str, tuple[torch.nn.Parameter, Any]] = {}
    for dtype in DTYPES:
        param = torch.nn.Parameter(torch.zeros_like(problem.scales))
        options: dict[str, Any] = dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        optimizers[dtype] = param, fusedopt.FusedAdam([param], 0.0, (BETA1, beta2), **options)
    exp_avg = torch.zeros_like(problem.scales, dtype=torch.float64)
    exp_avg_sq = torch.zeros_like(exp_avg)
    for step in range(problem.steps):
        grad = problem.gradient(step)
        exp_avg.lerp_(grad.double(), 1 - BETA1)
        exp_avg_sq.mul_(beta2).addcmul_(grad.double(), grad.double(), value=1 - beta2)
        for param, optimizer in optimizers.values():
            param.grad = grad
            optimizer.step()
    rows = []
    for dtype, (param, optimizer) in optimizers.items():
        second = optimizer.get_unscaled_state(param, "exp_avg_sq").double()
        ratio = (second / exp_avg_sq).clamp(min=2.0**-60).log2() / 2  # of the root
        error = (
            optimizer.get_unscaled_state(param, "exp_avg").double() - exp_avg
        ) / exp_avg_sq.sqrt()
        rows.append(
            dict(
                dtype=dtype,
                beta2=beta2,
                backend=optimizer.backend,
                second_error=ratio.abs().mean().item(),
                second_bias=ratio.mean().item(),
                second_zeros=(second == 0).double().mean().item(),
                first_rms=error.square().mean().sqrt().item(),
                first_bias=error.mean().item(),
                first_growth=(error * exp_avg.sign()).mean().item(),
            )
        )
    return rows


def targets(row: dict[str, Any]) -> str:
    """What is to be reached, and whether it is."""
    checks = []
    if row["dtype"] == "fp8":
        checks += [
            ("sqrt(v) <= 0.16", row["second_error"] <= 0.16),
            ("|bias| <= 0.01", abs(row["second_bias"]) <= 0.01),
            ("no zeros", row["second_zeros"] == 0),
            ("m rms <= 0.035", row["first_rms"] <= 0.035),
            ("m unbiased", max(abs(row["first_bias"]), abs(row["first_growth"])) <= 0.001),
        ]
    if row["dtype"] == "bf16" and row["beta2"] == 0.999:
        checks.append(("sqrt(v) <= 0.07", row["second_error"] <= 0.07))
    return "; ".join(f"{text} {'ok' if reached else 'MISS'}" for text, reached in checks)


def markdown(rows: list[dict[str, Any]], problem: Problem) -> str:
    columns = {
        "second_error": "mean abs log2 error of sqrt(v)",
        "second_bias": "mean log2 ratio",
        "second_zeros": "zeros",
        "first_rms": "rms error of m / sqrt(v)",
        "first_bias": "mean",
        "first_growth": "mean, sign of m",
    }
    count, device = problem.scales.numel(), problem.scales.device.type
    lines = [
        f"{count} elements, {problem.steps} steps on {device}, backend {rows[0]['backend']}\n",
        "| b2 | states | " + " | ".join(columns.values()) + " | target |",
        "|" + "---|" * (len(columns) + 3),
    ]
    for row in rows:
        values = " | ".join(f"{row[name]:.5f}" for name in columns)
        lines.append(f"| {row['beta2']} | {row['dtype']} | {values} | {targets(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="cuda or cpu")
    elements = 2**20 if cuda else 2**16
    parser.add_argument("--elements", type=int, default=elements, help="of each state")
    parser.add_argument("--steps", type=int, default=5000, help="of each optimizer")
    parser.add_argument("--spread", type=float, default=1.0, help="of log(scale) within a block")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for beta2 in (0.999, 0.95):
        device = torch.device(options.device)
        problem = Problem(options.elements, options.steps, options.spread, device)
        rows += run(problem, beta2)
    text = markdown(rows, problem)
    print(f"{text}\n{time.perf_counter() - start:.0f} s")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fidelity.md").write_text(text + "\n")
    (options.out / "fidelity.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
