"""Compare one step() of fusedopt with its peers: `python benchmarks/step.py`.

On a GPU machine it runs every workload; without a GPU a small comparison of the CPU paths.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from configs import CPU_WORKLOADS, OURS, WORKLOADS, Config, Workload, configs
from measure import Result, copy_bandwidth, measure, time_launches

HEADINGS = (
    "device ms",
    "kernels ms",
    "share",
    "host us",
    "new/same grads us",
    "launches",
    "extra bytes",
    "state B/param",
)
WIDTHS = [max(14, len(heading) + 2) for heading in HEADINGS]
NARROW = ("fp8", "fp16")  # states whose kernels do more arithmetic


@dataclass
class Row:
    """One config on one workload."""

    workload: str
    config: Config
    result: Result

    def cells(self) -> list[str]:
        r = self.result
        if r.error:
            return [f"error: {r.error}", *[""] * (len(HEADINGS) - 1)]
        launches = _number(r.launches, ".0f")
        return [
            _number(r.device_ms, ".3f"),
            _number(r.kernel_ms, ".3f"),
            _number(r.share, ".3f"),
            _number(r.host_us, ".1f"),
            "/".join(_number(us, ".0f") for us in (r.host_new_grads_us, r.host_same_grads_us)),
            f"{launches} + {r.copies:.0f} copies" if r.copies else launches,
            _number(r.extra_bytes, ",d"),
            _number(r.state_bytes, ".3f"),
        ]

    def targets(self, rows: list[Row]) -> str:
        """What is to be reached, and whether it is."""
        if self.config.library != OURS:
            return ""
        return "; ".join(
            f"{text} {'ok' if reached else 'MISS'}" for text, reached in self._targets(rows)
        )

    def _targets(self, rows: list[Row]) -> Iterator[tuple[str, bool]]:
        r, form = self.result, self.config.form
        if r.device_ms is None:
            return
        same = [row for row in rows if (row.workload, row.config.form) == (self.workload, form)]
        of = {row.config.library: row.result for row in same}
        fused = of.get("torch fused", Result()).device_ms
        if self.workload == "cpu":
            if fused:
                yield "<= torch fused", r.device_ms <= fused
            return
        if self.workload in ("big", "giant") and r.share is not None:
            states = form.rpartition(",")[2]
            limit = 0.93 if any(name in states for name in NARROW) else 0.96
            limit = 0.90 if form.startswith("norm") else limit
            yield f"share >= {limit}", r.share >= limit
        if self.workload == "big" and fused and form.startswith(("fp32", "clip")):
            limit = 1.25 if form.startswith("clip") else 1.15
            yield (
                f"{fused / r.device_ms:.2f}x torch fused >= {limit}x",
                fused / r.device_ms >= limit,
            )
        if r.host_us is not None:
            host = {"tiny": (60, 40), "gpt2": (25, 15), "scalars": (1000,)}
            for limit in host.get(self.workload, ()):
                yield f"host <= {limit} us", r.host_us <= limit
        device = {"tiny": 0.03, "scalars": 1.0}.get(self.workload)
        if device:
            yield f"device <= {device} ms", r.device_ms <= device
        if r.host_new_grads_us is not None and r.host_same_grads_us is not None:
            ratio = r.host_new_grads_us / r.host_same_grads_us
            yield f"new grads {ratio:.2f}x <= 1.5x", ratio <= 1.5
        if r.host_new_grads_us is not None and r.host_us is not None:  # beside warm caches
            yield "new grads <= 1.5x host", r.host_new_grads_us <= 1.5 * r.host_us
        if r.launches is not None and r.signatures:
            most = 1 + r.signatures + 2 * form.startswith("clip")
            most = 2 if form.startswith("norm") else most
            yield f"launches <= {most}", r.launches <= most
        if not form.startswith("norm"):  # which returns a new tensor
            yield "extra 0", r.extra_bytes == 0
        if "fp8 states" in form and self.workload == "big" and r.state_bytes:
            most_bytes = 2.04 + 2 * ("remainders" in form) + ("24 bits" in form)
            most_bytes += 4 * ("fp32 master" in form) + 2.02 * ("fp16 master" in form)
            yield f"state <= {most_bytes:.2f} B", r.state_bytes <= most_bytes


def _columns(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _number(value: float | int | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def measure_row(
    workload: Workload, config: Config, device: torch.device, bandwidth: float, quick: bool
) -> Result:
    try:
        params, groups = workload.make(config.dtype, device)
        optimizer = config.make(groups)
        return measure(
            optimizer,
            config.step(optimizer, params),
            params,
            bandwidth=bandwidth,
            gradient_reads=config.gradient_reads,
            quick=quick,
        )
    except Exception as error:  # A peer's failure is a row of the table.
        lines = str(error).strip().splitlines()
        return Result(error=f"{type(error).__name__}: {lines[0][:160] if lines else ''}")


def build_kernels(chosen: list[Config], device: torch.device) -> None:
    """Compile side by side what the run needs, for large and for small tensors."""

    def one_step(config: Config) -> None:
        params, groups = Workload("", lambda: [(8192,), (8,)]).make(config.dtype, device)
        config.step(config.make(groups), params)()

    ours = [config for config in chosen if config.library == OURS]
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(one_step, config) for config in ours]
    failed = sum(future.exception() is not None for future in futures)
    seconds = time.perf_counter() - start
    print(f"kernels of {len(ours)} configs ready in {seconds:.1f} s, {failed} failed", flush=True)


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return (
        f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}, {torch.get_num_threads()} CPU threads"
    )


def markdown(rows: list[Row], bandwidths: dict[str, float], device: torch.device) -> str:
    text = [f"# One step() beside its peers\n\n{machine(device)}\n"]
    for workload, bandwidth in bandwidths.items():
        mine = [row for row in rows if row.workload == workload]
        text.append(f"## {workload}\n\nA large copy moves {bandwidth / 1e12:.3f} TB/s.\n")
        text.append("| " + " | ".join(("form", "library", *HEADINGS, "target")) + " |")
        text.append("|" + "---|" * (len(HEADINGS) + 3))
        for row in mine:
            cells = [row.config.form, row.config.library, *row.cells(), row.targets(mine)]
            text.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        text.append("")
    return "\n".join(text + summary(rows))


def summary(rows: list[Row]) -> list[str]:
    """What compares rows of several workloads."""
    text = []
    ours = {row.workload: row.result for row in rows if row.config.name == f"fp32 / {OURS}"}
    one, many = ours.get("groups1", Result()), ours.get("groups16", Result())
    if one.device_ms and many.device_ms and one.host_us and many.host_us:
        device, host = many.device_ms / one.device_ms, many.host_us / one.host_us
        verdict = "ok" if device <= 1.05 else "MISS"
        text.append(f"16 groups beside 1: {device:.2f}x device, {host:.2f}x host: {verdict}\n")
    totals: dict[str, dict[str, float]] = {}
    for row in rows:
        r = row.result
        if row.config.form == "fp32" and r.device_ms is not None and r.host_us is not None:
            cost = max(r.device_ms, r.host_us / 1000)
            totals.setdefault(row.config.library, {})[row.workload] = cost
    wanted = ("big", "gpt2", "tiny")
    for library, costs in totals.items():
        if all(name in costs for name in wanted):
            total = sum(costs[name] for name in wanted)
            text.append(f"- fp32, {library}: big + gpt2 + tiny = {total:.3f} ms")
    return [*text, ""]


def draw(rows: list[Row], folder: Path) -> None:
    """One picture per workload: time on the device, and until step() returns."""
    from matplotlib.figure import Figure

    for workload in dict.fromkeys(row.workload for row in rows):
        mine = [row for row in rows if row.workload == workload and row.result.device_ms]
        if not mine:
            continue
        figure = Figure(figsize=(12, 1.2 + 0.24 * len(mine)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        names = [row.config.name for row in mine]
        colors = ["tab:red" if row.config.library == OURS else "tab:gray" for row in mine]
        left.barh(names, [row.result.device_ms or 0 for row in mine], color=colors)
        left.set_xlabel("device, ms per step")
        if workload in ("big", "giant", "cpu"):
            for i, row in enumerate(mine):
                label = f" {row.result.share:.0%}" if row.result.share else ""
                left.text(row.result.device_ms or 0, i, label, va="center", fontsize=7)
            left.set_title("share of a large copy's bandwidth at the bars' ends", fontsize=9)
        right.barh(names, [row.result.host_us or 1 for row in mine], color=colors)
        right.set_xlabel("host, us until step() returns")
        right.set_xscale("log")
        left.invert_yaxis()
        left.tick_params(axis="y", labelsize=7)
        figure.suptitle(workload)
        figure.savefig(folder / f"step_{workload}.png", dpi=120)


def save(rows: list[Row], bandwidths: dict[str, float], device: torch.device, folder: Path) -> None:
    (folder / "step.md").write_text(markdown(rows, bandwidths, device))
    record = {
        "machine": machine(device),
        "copy_bytes_per_second": bandwidths,
        "rows": [
            {
                "workload": row.workload,
                "form": row.config.form,
                "library": row.config.library,
                **asdict(row.result),
            }
            for row in rows
        ],
    }
    (folder / "step.json").write_text(json.dumps(record, indent=1))


def wanted(workload: Workload, config: Config, options: argparse.Namespace) -> bool:
    if options.config:
        return any(part in config.name for part in options.config)
    return options.all or not workload.forms or config.form in workload.forms


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    offered = WORKLOADS if device.type == "cuda" else CPU_WORKLOADS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    allowed = ", ".join(workload.name for workload in offered)
    parser.add_argument("--workload", action="append", help=f"repeatable: begins one of {allowed}")
    parser.add_argument("--config", action="append", help="repeatable: part of 'form / library'")
    parser.add_argument("--all", action="store_true", help="every config on every workload")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    options = parser.parse_args()
    for name in options.workload or ():
        if not any(workload.name.startswith(name) for workload in offered):
            parser.error(f"--workload must begin one of {allowed} on {device.type}, got {name!r}")
    every = list(configs())
    for part in options.config or ():
        if not any(part in config.name for config in every):
            listed = "\n  ".join(config.name for config in every)
            parser.error(f"--config must be part of one of these, got {part!r}:\n  {listed}")
    options.out.mkdir(parents=True, exist_ok=True)
    names = max(len(config.name) for config in every)
    workloads = [
        workload
        for workload in offered
        if not options.workload or any(workload.name.startswith(n) for n in options.workload)
    ]
    chosen = {
        workload: [config for config in every if wanted(workload, config, options)]
        for workload in workloads
    }
    print(machine(device), flush=True)
    build_kernels([c for c in every if any(c in some for some in chosen.values())], device)
    rows: list[Row] = []
    bandwidths: dict[str, float] = {}
    for workload, some in chosen.items():
        bandwidths[workload.name] = bandwidth = copy_bandwidth(device)
        print(f"\n{workload.name}: a large copy moves {bandwidth / 1e12:.3f} TB/s", flush=True)
        if device.type == "cuda":
            print(
                f"two empty kernels are launched in {1e6 * time_launches(device):.1f} us",
                flush=True,
            )
        print(f"{'':{names}}{_columns(HEADINGS)}", flush=True)
        for config in some:
            row = Row(
                workload.name,
                config,
                measure_row(workload, config, device, bandwidth, options.quick),
            )
            rows.append(row)
            cells = _columns(row.cells())
            print(f"{config.name:{names}}{cells}  {row.targets(rows)}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            save(rows, bandwidths, device, options.out)
        draw(rows, options.out)
    # With every row known, the targets that name a peer can be judged.
    text = markdown(rows, bandwidths, device)
    missed = [line for line in text.splitlines() if "MISS" in line]
    print("\n" + "\n".join(summary(rows)))
    print("\n".join(missed))
    print(f"{len(missed)} rows miss a target; tables and pictures are in {options.out}")


if __name__ == "__main__":
    main()
