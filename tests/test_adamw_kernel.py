"""training/adamw_kernel.py without a GPU: in Triton's interpreter, and compiled for three kinds of card."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton", reason="torch brings Triton on Linux")
CASES = [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16"), ("u8", "bf16")]
"""Types of the moments, and of weights and gradients."""
BYTES_FROM_TABLES = 2 * (1 + 8) * 4
"""For each number in 8 bits, of 1024 that a program looks up: two moments, and eight borders each. They stay in the cache."""


@pytest.mark.slow
@pytest.mark.timeout(240, func_only=True)
def test_in_the_interpreter_it_equals_the_operators_bit_for_bit_and_moves_each_byte_once():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/adamw_in_interpreter.py"]  # in a process that has not imported Triton yet
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=220, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 22
    for row in rows:
        num, states, *_ = row["case"].split()
        from_tables = BYTES_FROM_TABLES * math.ceil(int(num) / 1024) * 1024 if states == "8bit" else 0
        assert row["differ"] == [] and sum(row["moved"].values()) == row["least"] + from_tables, row
    case = next(row for row in rows if row["case"].startswith("4173 bf16 torch.bfloat16"))
    assert sum(case["moved"].values()) == 14 * 4173


@pytest.mark.parametrize(
    "target", [("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)], ids=lambda t: str(t[1])
)
def test_it_compiles_for_cards_that_are_not_here_with_exact_quotients_and_wide_loads(target, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from training.adamw_kernel import ROWS, step_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = step_kernel.arg_names
    for moments, weights in CASES:
        in_8_bits = moments == "u8"
        types = dict.fromkeys(names, "fp32") | dict.fromkeys(("num", "key", "other_key"), "i32")
        types |= dict.fromkeys(("weights", "gradients"), f"*{weights}") | dict.fromkeys(
            ("means", "squares"), f"*{moments}"
        )
        types |= dict.fromkeys(
            ("mean_scales", "square_scales", "mean_table", "square_table"), "*fp32" if in_8_bits else f"*{moments}"
        )
        types |= {name: "constexpr" for name in names if name.isupper()}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if types[name].startswith("*") or name == "num"
        }
        constants = {"IN_8_BITS": in_8_bits, "STOCHASTIC": True, "ROWS": ROWS}
        source = ASTSource(step_kernel, types, constants, aligned)
        made = compile(source, target=GPUTarget(*target), options={"enable_fp_fusion": False}).asm
        assert made["hsaco" if target[0] == "hip" else "cubin"]
        if target[0] == "cuda":
            code = made["ptx"]
            assert "fma" not in code and "approx" not in code and "div.full" not in code
            assert in_8_bits or code.count("ld.global") == code.count("ld.global.v4")
