"""The emitted C chooses the Hopper forward's tile as the planner does."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from flashtile.export import schedule
from flashtile.kernels.sm90.host.choose_forward import choose_forward
from flashtile.plan.device import H100
from flashtile.problem.attention import AttentionProblem

COMPILER = shutil.which("cc")

PRELUDE = """
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef enum { FLASHTILE_OK, FLASHTILE_OUT_OF_MEMORY = 7 } flashtile_status;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static flashtile_status fail(flashtile_status status, const char *format, long long value) {
    printf(format, value);
    return status;
}
"""
CALL = """
int choose_for(int64_t batch, int64_t heads, int64_t q, int64_t k, int64_t blocks, int64_t *choice, int64_t *swizzle) {
    return schedule_forward(&problem_schedule, batch, heads, q, k, blocks, choice, swizzle);
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    "tail",
    [
        "x64,kv=1x1x64,bf16,band=:0", "x128,kv=1x1x128,fp16,band=:0", "x128,kv=1x1x128,bf16", "x64,kv=1x1x64,bf16,band=100:3",
        "x192,kv=1x1x128,bf16,band=:0", "x256,kv=1x1x256,bf16,band=-3:70", "x96,kv=1x1x80,bf16,band=500:",
    ],
)  # fmt: skip
@pytest.mark.parametrize("group", [1, 4])
def test_c_chooses_as_the_planner(tmp_path: Path, tail: str, group: int) -> None:
    assert COMPILER is not None
    problem = AttentionProblem.parse(f"attention(q=1x1x{group}{tail})")
    source, library = tmp_path / "choose.c", tmp_path / "choose.so"
    source.write_text(PRELUDE + schedule.code() + schedule.table(problem, "problem") + CALL)
    flags = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).choose_for
    draw = random.Random(group)
    seen: set[int] = set()
    for _ in range(150):
        batch, heads_kv = draw.choice([1, 2, 8, 33]), draw.choice([1, 2, 5, 16])
        q, k = (draw.choice([1, 64, 127, 1000, 1024, 4096, draw.randint(1, 9000)]) for _ in range(2))
        sms = draw.choice([132, 114, 78])
        sizes = replace(problem, batch=batch, heads_q=heads_kv * group, heads_kv=heads_kv, seqlen_q=q, seqlen_k=k)
        launch = choose_forward(sizes, replace(H100, sm_count=sms))
        choice, swizzle = ctypes.c_int64(), ctypes.c_int64()
        for _twice in range(2):  # the second answer is remembered
            status = function(
                *map(ctypes.c_int64, (batch, sizes.heads_q, q, k, sms)), ctypes.byref(choice), ctypes.byref(swizzle)
            )
            assert status == 0
            assert choice.value == schedule.number_of(sizes, launch), sizes.spell()
            if swizzle.value:
                assert swizzle.value == launch.swizzle, sizes.spell()
        seen.add(choice.value)
        assert choice.value in schedule.feasible(sizes)
    assert len(seen) > 1 or len(schedule.launches(problem)) == 1, "the sizes ask for one tile only"
