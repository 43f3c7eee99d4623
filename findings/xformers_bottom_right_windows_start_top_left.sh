#!/usr/bin/env bash
# xformers 0.0.35, CPU: a window put on a bottom-right causal mask of blocks is counted from the first key, another class's is not.
#
# With 4 queries and 10 keys, bottom right means that the last query sees the last key. LowerTriangularFromBottomRightMask keeps that
# under make_local_attention(3): the last query sees keys 7 to 9. The same mask for sequences in one batch,
# BlockDiagonalMask.make_causal_from_bottomright(), has a method of the same name, and its result starts at the top left: the last
# query sees keys 1 to 3, and none of the six keys after them, which are those nearest to it. Where queries and keys are as many,
# both are the same. BlockDiagonalMask.make_local_attention_from_bottomright(3) is what keeps the end.
#
# Seen here: the keys that the last query sees, by each mask's own `materialize`. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import xformers
from xformers.ops.fmha.attn_bias import BlockDiagonalMask, LowerTriangularFromBottomRightMask

blocks = BlockDiagonalMask.from_seqlens([4], [10])
masks = {
    "LowerTriangularFromBottomRightMask, local 3": LowerTriangularFromBottomRightMask().make_local_attention(3),
    "BlockDiagonalMask, causal from bottom right": blocks.make_causal_from_bottomright(),
    "BlockDiagonalMask, causal from bottom right, local 3": blocks.make_causal_from_bottomright().make_local_attention(3),
    "BlockDiagonalMask, local from bottom right 3": blocks.make_local_attention_from_bottomright(3),
}
found = [(mask.materialize((1, 1, 4, 10))[0, 0] == 0)[-1].nonzero().flatten().tolist() for mask in masks.values()]
for name, seen in zip(masks, found):
    print(f"xformers {xformers.__version__}, {name}: the last of 4 queries sees of 10 keys {seen}")
assert found == [[7, 8, 9], list(range(10)), [1, 2, 3], [7, 8, 9]], found
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
python3 -m pip --python "$folder/venv" install --quiet --no-deps xformers==0.0.35 # masks need nothing compiled
"$folder/venv/bin/python" -W ignore "$folder/look.py"
