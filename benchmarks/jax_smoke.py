"""The first thing to run on a GPU: one problem by every kind of plan, with `flashtile.jax`, against plain JAX.

python benchmarks/jax_smoke.py
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from flashtile import Alibi
from flashtile.jax import dot_product_attention

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}


def check(name: str, dtype: Any, more: dict[str, Any], **options: Any) -> None:
    keys = jax.random.split(jax.random.key(1), 6)
    leaves = {n: jax.random.normal(k, (2, 300, h, 64)).astype(dtype) for n, k, h in zip("qkv", keys, (4, 2, 2), strict=False)}
    leaves |= more
    dout = jax.random.normal(keys[4], (2, 300, 4, 64)).astype(dtype)

    def run(leaves: Any, dout: Any, implementation: Any, extra: Any) -> Any:
        def function(x: Any) -> Any:
            score = (Alibi(x["slopes"]),) if "slopes" in x else ()
            return dot_product_attention(
                x["q"], x["k"], x["v"], x.get("bias"), is_causal=True, implementation=implementation, score=score,
                sinks=x.get("sinks"), return_residual=True, **extra,
            )  # fmt: skip

        made, pull = jax.vjp(function, leaves)
        return made, pull((dout, jnp.ones(made[1].shape)))

    start = time.perf_counter()
    try:
        plain = {k: v for k, v in options.items() if k not in ("backward", "implementation")}
        got = jax.jit(
            lambda a, b: run(a, b, options.get("implementation"), {k: v for k, v in options.items() if k != "implementation"})
        )(leaves, dout)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), leaves)
        with jax.default_matmul_precision("highest"):
            truth = jax.jit(lambda a, b: run(a, b, "xla", plain))(wide, dout.astype(jnp.float32))
        off = jax.tree.map(lambda a, b: float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()), got, truth)
        worst = max(jax.tree.leaves(off))
        verdict = "ok  " if worst <= TOLERANCE[jnp.dtype(dtype).name] else "FAIL"
        print(
            f"{verdict} {name}: off by {worst:.1e}, {time.perf_counter() - start:.1f} s {'' if verdict == 'ok  ' else off}",
            flush=True,
        )
    except Exception as error:
        print(f"FAIL {name}: {type(error).__name__}: {error}"[:1500], flush=True)
        if name.startswith("hopper"):
            traceback.print_exc()


def main() -> None:
    print(jax.devices(), jax.__version__)
    slopes, sinks = jnp.array([0.1, 0.2, 0.05, 0.3]), jnp.array([0.1, -0.2, 0.5, 0.0])
    bias = jax.random.normal(jax.random.key(7), (1, 4, 300, 300))
    check("hopper bf16", jnp.bfloat16, {})
    check("triton bf16 split", jnp.bfloat16, {}, backward="split", implementation="triton")
    check("triton bf16 fused", jnp.bfloat16, {}, backward="fused", implementation="triton")
    check("triton fp32", jnp.float32, {})
    check("triton fp32 fused", jnp.float32, {}, backward="fused")
    check("alibi bf16", jnp.bfloat16, {"slopes": slopes})
    check("bias and sinks fp32", jnp.float32, {"bias": bias, "sinks": sinks})
    check("softcap fp16", jnp.float16, {}, softcap=5.0)
    check("deterministic bf16", jnp.bfloat16, {}, deterministic=True)
    check("xla backward bf16", jnp.bfloat16, {}, backward="xla")
    check("lengths bf16", jnp.bfloat16, {}, key_value_seq_lengths=jnp.array([37, 300], jnp.int32), alignment="bottom-right")


if __name__ == "__main__":
    main()
