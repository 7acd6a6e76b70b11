"""The Triton kernel without a GPU: interpreted in a process of its own, and compiled for real targets."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: the CUDA kernel can be neither interpreted nor compiled",
)


def test_the_interpreted_kernel_gives_the_bits_of_the_reference():
    cases = Path(__file__).with_name("fingerprint_triton_cases.py")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 7


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_gpus(capability):
    """No GPU is needed to compile: whole chunks must be read by 16-byte vector loads."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sdcrun.shim.fingerprint import triton_kernel as kernel

    source = ASTSource(
        fn=kernel.table_kernel,
        signature={"table": "*i64", "result": "*i64", "BLOCK": "constexpr"},
        constexprs={"BLOCK": kernel._BLOCK},
        attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
    )
    try:
        built = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernel._WARPS})
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(f"this Triton cannot compile for CUDA here: {error}")
    assert "ld.global.v4.b32" in built.asm["ptx"]
    assert built.asm["ptx"].count("red.global.gpu.relaxed.add.u64") == 2
