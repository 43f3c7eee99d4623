#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: where a mask adds -1e9 to every score of a row, SDPA's gradients are as many times too large as the row has keys.
#
# A constant added to all scores of a row changes nothing, and SDPA's output is right. Its backward makes weights anew, as exp(score - lse) with
# lse = log(sum(exp(score))). In float32 -1e9 + log(64) is -1e9, so that 64 weights of 1/64 become 64 weights of 1. finfo.min, the usual "hidden",
# does the same to items that are all padding, -1e7 is off by a fifth. SDPA's math backend is right, and so is softmax by hand. But
# torch.compile puts SDPA's kernel in place of attention that is written by hand: then it is wrong by the same factor, with the loss unchanged.
#
# Seen here: the norm of each gradient over the one by hand, in SDPA, in its math backend and compiled. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.set_num_threads(1)
keys = 64
q, k, v = (torch.randn(1, 1, n, 8, generator=torch.manual_seed(n)).requires_grad_() for n in (4, keys, keys))


def by_hand(mask):
    return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5 + mask, -1) @ v


def sdpa(mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_math(mask):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(mask)


def look(attention, mask):
    out = attention(mask)
    return out.detach(), [x.norm() for x in torch.autograd.grad(out.sum(), (q, k, v))]


ways = {"SDPA": sdpa, "its math backend": sdpa_math, "by hand, compiled": torch.compile(by_hand)}
for added in (0.0, -1e4, -1e6, -1e7, -1e9, torch.finfo(torch.float32).min):
    mask = torch.full((4, keys), added)
    right, norms = look(by_hand, mask)
    for name, attention in ways.items():
        out, found = look(attention, mask)
        times = [(x / y).item() for x, y in zip(found, norms)]
        said = ", ".join(f"{x:.4f}" for x in times)
        print(f"torch {torch.__version__}, {added:g} on all of {keys} keys, {name}: output within {(out - right).abs().max():.0e}, dq, dk, dv times {said}")
        assert torch.allclose(out, right, atol=1e-5)
        wrong = attention is not sdpa_math
        if wrong and added < -1e8:
            assert all(abs(x - keys) < 0.01 for x in times), times
        elif wrong and added == -1e7:
            assert any(abs(x - 1) > 0.1 for x in times), times
        elif not wrong or added > -1e5:
            assert all(abs(x - 1) < 1e-3 for x in times), times
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
