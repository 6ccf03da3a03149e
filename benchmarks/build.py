"""How long the kernels take to build and to load: `python benchmarks/build.py`.

Each figure is taken in a process of its own; the first two with a cache that was empty before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What a process does: arguments are the device and the states' dtype, or "torch" for torch's own.
PROGRAM = """
import json, sys, time
import torch
device, dtype = sys.argv[1:]
torch.zeros(1, device=device)  # starts CUDA, which is not ours to count
param = torch.nn.Parameter(torch.zeros(8192, device=device))
param.grad = torch.zeros_like(param)
start = time.perf_counter()
import fusedopt
imported = time.perf_counter()
if dtype == "torch":
    optimizer = torch.optim.AdamW([param], fused=True)
else:
    optimizer = fusedopt.FusedAdam([param], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
optimizer.step()
if device == "cuda":
    torch.cuda.synchronize()
stepped = time.perf_counter()
print(json.dumps([imported - start, stepped - imported, getattr(optimizer, "backend", dtype)]))
"""


def first_step(cache: str, device: str, dtype: str) -> tuple[float, float, str]:
    """Seconds of the import and of the first step, and the backend that ran."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "FUSEDOPT_CACHE_DIR": cache,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-c", PROGRAM, device, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the first step failed:\n{done.stderr}")
    imported, stepped, backend = json.loads(done.stdout.splitlines()[-1])
    return imported, stepped, backend


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=available, help="cuda or cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    cold = (25, 15) if cores >= 16 else (45,)
    lines = [
        f"{options.device}, {cores} cores, torch {torch.__version__}\n",
        "| | import s | first step s | backend | target |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as cache:
        for name, dtype, limits in (
            ("cold build, fp32 states", "fp32", cold),
            ("second signature, fp8 states", "fp8", (5,)),
            ("warm, fp32 states", "fp32", (2, 1)),
            ("warm, fp8 states", "fp8", (2, 1)),
            ("torch.optim.AdamW(fused=True)", "torch", ()),
        ):
            imported, stepped, backend = first_step(cache, options.device, dtype)
            target = "; ".join(
                f"together <= {limit} s {'ok' if imported + stepped <= limit else 'MISS'}"
                for limit in limits
            )
            lines.append(f"| {name} | {imported:.2f} | {stepped:.2f} | {backend} | {target} |")
            print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "build.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
