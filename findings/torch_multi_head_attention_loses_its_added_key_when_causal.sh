#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: with is_causal=True, nn.MultiheadAttention's add_bias_kv and add_zero_attn add a key that no query sees.
#
# Both put one key behind all others (learned, or of zeros), and a mask gets a column for it, so that every query sees it. is_causal=True is a hint:
# "the mask is causal, take the fast way", and not to change the result. But with need_weights=False the mask is dropped before the
# column is added, and SDPA's own causal order begins at the first key: the last key of all is in the future of every query. The layer computes as if it had
# none, and bias_k and bias_v never get a gradient other than 0, so that weight decay takes them away. need_weights=True, the default, sees the key.
#
# Seen here: one layer and one causal mask, with and without the hint and the weights. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch

torch.manual_seed(0)
x = torch.randn(1, 5, 8)
mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
for added in ("add_bias_kv", "add_zero_attn"):
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, **{added: True})
    bare = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    bare.load_state_dict(layer.state_dict(), strict=False)
    right = layer(x, x, x, attn_mask=mask)[0].detach()
    without = bare(x, x, x, attn_mask=mask)[0].detach()
    for hint in (False, True):
        for weights in (False, True):
            out = layer(x, x, x, attn_mask=mask, is_causal=hint, need_weights=weights)[0]
            layer.zero_grad()
            out.square().sum().backward()
            off, same = ((out - y).abs().max().item() for y in (right, without))
            gradients = [f"{b.grad.abs().max():.3f}" for b in (layer.bias_k, layer.bias_v) if b is not None]
            said = f"{off:.3f} from the masked result, {same:.3f} from a layer without the key; gradients of the key and value {gradients}"
            print(f"torch {torch.__version__}, {added}, is_causal={hint}, need_weights={weights}: {said}")
            lost = hint and not weights
            assert (same < 1e-6, off < 1e-6) == (lost, not lost)
            assert all((gradient == "0.000") == lost for gradient in gradients)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
