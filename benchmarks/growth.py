"""Time against parameters, tensors and groups: `python benchmarks/growth.py`, one picture."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from configs import Config, Workload, configs
from measure import time_device, time_host

FORMS = ("fp32", "bf16 p + remainders, fp8 states")
Sweep = dict[int, Workload]


def same(count: int, numel: int, groups: int = 1) -> Workload:
    return Workload("", lambda: [(numel,)] * count, groups)


def sweeps(on_gpu: bool) -> dict[str, Sweep]:
    """What grows, and the workload at each size."""
    scale = 1 if on_gpu else 64  # a CPU gets less
    parameters = [2**n // scale for n in range(20, 33, 2)]  # 1 million to 4 billion
    tensors = [1, 10, 100, 1000, 10_000, 50_000][: 6 if on_gpu else 4]
    return {
        "parameters, in 32 tensors": {n: same(32, n // 32) for n in parameters},
        "tensors of 512 elements": {n: same(n, 512) for n in tensors},
        "groups, 84 million parameters in 160 tensors": {
            n: same(160, 2**19 // scale, n) for n in (1, 2, 4, 8, 16)
        },
    }


def measure_point(workload: Workload, config: Config, device: torch.device) -> dict[str, float]:
    params, groups = workload.make(config.dtype, device)
    optimizer = config.make(groups)
    step = config.step(optimizer, params)
    for _ in range(3):
        step()
    return {
        "device_ms": 1e3 * time_device(step, device, queued=5, rounds=7),
        "host_us": 1e6 * time_host(step, device, 50, budget=0.5),
    }


def draw(points: list[dict[str, Any]], path: Path, device: torch.device) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(point["sweep"] for point in points))
    quantities = {"device_ms": "ms per step", "host_us": "us until step() returns"}
    figure = Figure(figsize=(5 * len(names), 7.5), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False)
    for row, (quantity, label) in enumerate(quantities.items()):
        for column, name in enumerate(names):
            ax = axes[row][column]
            for config in dict.fromkeys(point["config"] for point in points):
                mine = [p for p in points if (p["sweep"], p["config"]) == (name, config)]
                xs, ys = [p["size"] for p in mine], [p[quantity] for p in mine]
                ax.plot(xs, ys, "o-" if "fusedopt" in config else "s--", label=config)
            ax.set(xscale="log", yscale="log", xlabel=name, ylabel=f"{device.type}: {label}")
            ax.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", default="", help="part of 'form / library'")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [c for c in configs() if c.form in FORMS and options.config in c.name]
    points: list[dict[str, Any]] = []
    for name, sweep in sweeps(device.type == "cuda").items():
        for size, workload in sweep.items():
            for config in chosen:
                point: dict[str, Any] = dict(sweep=name, size=size, config=config.name)
                try:
                    point |= measure_point(workload, config, device)
                except Exception as error:
                    print(f"{name} {size:,} {config.name}: {error}", flush=True)
                    continue
                finally:
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                points.append(point)
                times = f"{point['device_ms']:10.3f} ms {point['host_us']:12.1f} us host"
                print(f"{size:>14,} {name:46} {config.name:46} {times}", flush=True)
        (options.out / "growth.json").write_text(json.dumps(points, indent=1))
        draw(points, options.out / "growth.png", device)


if __name__ == "__main__":
    main()
