#!/usr/bin/env bash
# PyTorch 2.13.0 and Keras 3.15.1, CPU: asking a multi-head attention layer for its weights changes its output, each in its own way.
#
# Of an item whose keys are all padding, torch.nn.MultiheadAttention gives the bias of its last projection with need_weights=False
# and NaN with need_weights=True, the default. keras.layers.MultiHeadAttention gives 0 with return_attention_scores=True, and the
# projected mean of all values, hidden ones among them, without. So a
# layer that is looked into is not the layer that was trained.
#
# Seen here: the same layer with and without its weights. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch

x = torch.randn(2, 4, 8, generator=torch.manual_seed(0))
padding = torch.tensor([[False] * 4, [True] * 4])
layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
torch.nn.init.normal_(layer.out_proj.bias)
with torch.no_grad():
    bare, asked = (layer(x, x, x, key_padding_mask=padding, need_weights=wanted)[0] for wanted in (False, True))
print(f"torch {torch.__version__}, padding alone: {bare[1, 0, :3].tolist()} without weights, {asked[1, 0, :3].tolist()} with them")
assert torch.allclose(bare[1], layer.out_proj.bias.detach().expand(4, 8)) and asked[1].isnan().all()
assert torch.allclose(bare[0], asked[0], atol=1e-6)

keras.utils.set_random_seed(0)
layer = keras.layers.MultiHeadAttention(2, 4)
keep = np.repeat(~padding.numpy()[:, None], 4, 1)
bare = layer(x, x, attention_mask=keep).detach().numpy()
asked = layer(x, x, attention_mask=keep, return_attention_scores=True)[0].detach().numpy()
print(f"keras {keras.__version__}, padding alone: {bare[1, 0, :3].tolist()} without weights, {asked[1, 0, :3].tolist()} with them")
assert (asked[1] == 0).all() and np.abs(bare[1]).max() > 0.1
assert np.allclose(bare[1], bare[1, :1], atol=1e-6) and np.allclose(bare[0], asked[0], atol=1e-6)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5 keras==3.15.1
"$folder/venv/bin/python" -W ignore "$folder/look.py"
