"""The Triton kernels compile for a GPU, without one: to PTX whose arithmetic is the native store's.

Bit-identity needs that nothing fuses a multiply and an add: no fma, and an explicit rounding mode on both, without
which the assembler may fuse them; and correctly rounded division and square root.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton (extra gpu-dev) is not installed")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shoal.kernels.device import triton_kernels as kernels

ROWS = {"bases": "*i64", "slots": "*i32", "ids": "*i64", "num_rows": "i32", "mixed_seed": "i64", "step_add": "i64"}
LAYOUT = {"LOG2_ROWS": 16, "STRIDE": 144, "WEIGHTS": 16, "BLOCK_D": 32, "DIM": 32, "BLOCK_N": 32}
SUM = {"grads": "*fp32", "entries": "*i32", "scales": "*fp32", "bounds": "*i32", "out": "*fp32"}

def ptx(kernel, types, **constants):
    names = [parameter.name for parameter in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in names}
    used = {name: value for name, value in (LAYOUT | constants).items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=used)
    options = {"enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]

update = ROWS | {"grads": "*fp32", "scalars": "*fp32"}
texts = [ptx(kernels.update_kernel, update, KIND=kind, DECAY=kind % 3, ROW_TYPE=row_type)
         for kind, row_type in ((0, 1), (1, 2), (2, 0), (3, 1))]
texts.append(ptx(kernels.gather_kernel, ROWS | {"out": "*fp32"}, ROW_TYPE=2))
texts.append(ptx(kernels.segment_sum_kernel, SUM, IS_SCALED=True))
create = ROWS | {"steps": "i32", "scalars": "*fp32"}
texts.append(ptx(kernels.create_kernel, create, SLOT_WIDTH=1, ROW_TYPE=2, BLOCK_S=1))
for text in texts:
    for word in ("fma.", "mul.f32", "add.f32", "sub.f32", "div.full", "div.approx", "sqrt.approx", ".ftz"):
        assert word not in text, word
assert "div.rn.f32" in texts[1] and "sqrt.rn.f32" in texts[1]
"""


def test_compiled_arithmetic_is_neither_fused_nor_approximate(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
