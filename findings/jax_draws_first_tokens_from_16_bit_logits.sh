#!/usr/bin/env bash
# JAX 0.10.2, CPU: of 1,024 equal logits in bfloat16, jax.random.categorical draws 87 of 100 tokens from the first quarter.
#
# Its noise has the dtype of the logits. In bfloat16 there are 128 uniform numbers to make it of, so that many of 1,024 tokens tie for the
# largest sum, and argmax takes the first of them. The later a token stands, the rarer it comes; some 300 never came, and of 32,768 equal
# tokens none behind the first 2,048. float16 leans the same way. The documentation speaks of float32 and of probabilities below 1e-7.
# mode="high" is right in both. jax.random.choice(p=...) in bfloat16 draws 128 of 1,024 tokens, whatever its mode: uniform numbers are
# looked up in cumulative sums. torch.multinomial and Categorical of the same numbers draw all alike.
#
# Seen here: 20,000 draws by each, and 1,000 of the 32,768. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import torch

tokens, draws, key = 1024, 20_000, jax.random.key(0)
torch.manual_seed(0)
found = {}
for dtype in ("float32", "float16", "bfloat16"):
    logits, p = jnp.zeros(tokens, dtype), jnp.full(tokens, 1 / tokens, dtype)
    theirs = torch.full((tokens,), 1 / tokens, dtype=getattr(torch, dtype))
    ways = {
        "categorical": jax.random.categorical(key, logits, shape=(draws,)),
        "categorical, mode high": jax.random.categorical(key, logits, shape=(draws,), mode="high"),
        "choice": jax.random.choice(key, tokens, (draws,), p=p),
        "choice, mode high": jax.random.choice(key, tokens, (draws,), p=p, mode="high"),
        "torch.multinomial": torch.cat([torch.multinomial(theirs.expand(1000, -1), 1)[:, 0] for _ in range(draws // 1000)]).numpy(),
    }
    for way, drawn in ways.items():
        times = np.bincount(np.asarray(drawn), minlength=tokens)
        found[dtype, way] = np.count_nonzero(times), times[: tokens // 4].sum() / draws
        said = "{} of {} tokens, {:.0%} of the draws in the first quarter".format(found[dtype, way][0], tokens, found[dtype, way][1])
        print(f"{'torch ' + torch.__version__ if 'torch' in way else 'jax ' + jax.__version__}, {dtype}, {way}: {said}")
last = int(jax.random.categorical(key, jnp.zeros(32_768, "bfloat16"), shape=(1000,)).max())
print(f"jax {jax.__version__}, bfloat16, categorical: of 32,768 equal tokens the last that 1,000 draws reached is {last:,}")
assert last < 2048, last
drawn, first = found["bfloat16", "categorical"]
assert drawn < 800 and first > 0.8, found
assert found["bfloat16", "choice"][0] == found["bfloat16", "choice, mode high"][0] == 128, found
assert found["float16", "categorical"][1] > 0.32, found
for (dtype, way), (drawn, first) in found.items():
    if dtype == "float32" or "torch" in way or way == "categorical, mode high":
        assert drawn == tokens and abs(first - 0.25) < 0.02, (dtype, way)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5 torch==2.13.0
"$folder/venv/bin/python" "$folder/look.py"
