"""Every kernel over awkward tensors, for NVIDIA's compute-sanitizer. No test: it asserts nothing.

python tests/sanitize.py                       # compile what is missing
compute-sanitizer python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py --every 2
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else memcheck sees one large allocation
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from cases import ROWS, Case, make, new_params, set_grads
from conftest import build_side_by_side
from torch.nn import Parameter

import fusedopt

CUDA = torch.device("cuda")
SIZES = (1, 255, 257, 4097, 6143, 9000)


def unaligned(case: Case, size: int) -> Parameter:
    return Parameter(torch.randn(size + 1).to(CUDA, case.dtype)[1:])


def run_row(case: Case) -> None:
    params = new_params(case, CUDA, [(size,) for size in SIZES])
    params += [unaligned(case, size) for size in (4096, 5000)]
    optimizer = make(case, params)
    set_grads(params)
    optimizer.step()
    set_grads(params)
    nan, zero = params[3].grad, params[5].grad
    assert nan is not None
    assert zero is not None
    nan[:256] = math.nan
    zero[256:512] = 0
    optimizer.step()


def run_gradients() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        params = [Parameter(torch.randn(size).to(CUDA, dtype)) for size in SIZES]
        set_grads(params)
        fusedopt.FusedAdam(
            params, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8", max_grad_norm=0.1
        ).step()
    many = [Parameter(torch.randn(7, device=CUDA)) for _ in range(5000)]
    set_grads(many)
    fusedopt.clip_grad_norm_(many, 0.1)
    fusedopt.FusedAdam(many).step()


def run_fp8_parameters() -> None:
    for dtype in (torch.float32, torch.float16):
        params = [fusedopt.fp8_parameter(torch.randn(size, device=CUDA)) for size in SIZES]
        optimizer = fusedopt.FusedAdam(
            params, master_weights=True, master_weight_dtype=dtype, use_decoupled_grad=True
        )
        for _ in range(2):
            for param in params:
                param.decoupled_grad = torch.randn(param.shape, device=CUDA)  # type: ignore[attr-defined]
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take each so many rows")
    rows = ROWS[:: parser.parse_args().every]
    build_side_by_side(CUDA)
    for case in rows:
        run_row(case)
    run_gradients()
    run_fp8_parameters()
    torch.cuda.synchronize()
    print(f"{len(rows)} rows, gradients and fp8 parameters: done")


if __name__ == "__main__":
    main()
