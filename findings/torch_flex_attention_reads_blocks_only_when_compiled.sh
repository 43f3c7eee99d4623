#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: FlexAttention that is not compiled overlooks which blocks a BlockMask lists, and asks its mask_mod alone.
#
# BlockMask.from_kv_blocks makes a mask of lists of blocks, as sparse attention computes them; its mask_mod may be left out. Compiled, a query sees the blocks
# that are listed. Eager, which by its warning is a slower way to the same, hides nothing: with no mask_mod all keys are seen. If there is a mask_mod it is no
# other: of lists that are narrower than a causal mask_mod eager takes the causal mask. to_dense() agrees with the compiled call. Whoever develops a sparse
# pattern in eager mode trains a dense model.
#
# Seen here: how far each call is from attention under the blocks' own mask, and from the mask_mod's. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

torch.set_num_threads(1)
size, blocks = 128, 3
n = size * blocks
q, k, v = (torch.randn(1, 1, n, 16, generator=torch.manual_seed(seed)) for seed in range(3))
counts, own = torch.ones(1, 1, blocks, dtype=torch.int32), torch.zeros(1, 1, blocks, blocks, dtype=torch.int32)
own[0, 0, :, 0] = torch.arange(blocks)  # each block of queries lists its own block of keys
causal = torch.ones(n, n, dtype=torch.bool).tril()
diagonal = torch.block_diag(*[torch.ones(size, size)] * blocks).bool()


def is_causal(b, h, i, j):
    return i >= j


def distances(out, masks):
    return {name: (out - F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).abs().max().item() for name, mask in masks.items()}


cases = {  # the mask; what its blocks say; what its mask_mod alone says
    "blocks, no mask_mod": (BlockMask.from_kv_blocks(counts, own, BLOCK_SIZE=size), diagonal, torch.ones_like(causal)),
    "blocks, a causal mask_mod": (BlockMask.from_kv_blocks(counts, own, BLOCK_SIZE=size, mask_mod=is_causal), diagonal & causal, causal),
}
compiled = torch.compile(flex_attention)
for name, (mask, blocks_say, mod_says) in cases.items():
    for way, attention in (("eager", flex_attention), ("compiled", compiled)):
        far = distances(attention(q, k, v, block_mask=mask), {"its blocks": blocks_say, "its mask_mod alone": mod_says})
        said = ", ".join(f"{x:.0e} from {which}" for which, x in far.items())
        print(f"torch {torch.__version__}, {name}, {way}: {said}")
        near, off = sorted(far, key=far.get)
        assert far[near] < 1e-5 and far[off] > 0.1 and (near == "its blocks") == (way == "compiled"), far
    assert torch.equal(mask.to_dense()[0, 0].bool(), torch.eye(blocks, dtype=torch.bool))
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
