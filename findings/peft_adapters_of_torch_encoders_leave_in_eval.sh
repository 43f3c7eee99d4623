#!/usr/bin/env bash
# peft 0.21.2 and PyTorch 2.13.0: LoRA in the linear layers of nn.TransformerEncoder is there in training, and gone after model.eval().
#
# In eval mode nn.TransformerEncoderLayer takes a fast path: one operator for the whole layer, which is handed linear1.weight and
# linear2.weight. peft puts modules of its own in their place, whose `weight` is the one from before. The fast path looks for hooks, and
# not for this. So the loss falls in training, and evaluation answers as the model that was never tuned, also after a save and a load.
# target_modules="all-linear" is no better, and the attention layer's adapter, ["self_attn"], goes the same way.
# Right are merge_and_unload(), train() without dropout and torch.backends.mha.set_fastpath_enabled(False).
#
# Seen here: losses before and after tuning, by mode and way. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import peft
import torch

x, y = torch.randn(2, 8, 6, 16, generator=torch.manual_seed(0))
versions = f"peft {peft.__version__}, torch {torch.__version__}"


def loss(model):
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


for targets in (["linear1", "linear2"], "all-linear", ["self_attn"]):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    before, values = loss(encoder), encoder(x).detach()
    model = peft.get_peft_model(encoder, peft.LoraConfig(r=8, lora_alpha=32, target_modules=targets)).train()
    steps = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(100):
        steps.zero_grad()
        (model(x) - y).square().mean().backward()
        steps.step()
    found = {"train()": loss(model), "eval()": loss(model.eval())}
    moved = (model(x).detach() - values).abs().max().item()
    torch.backends.mha.set_fastpath_enabled(False)
    found["eval(), no fast path"] = loss(model)
    torch.backends.mha.set_fastpath_enabled(True)
    found["eval(), merged"] = loss(model.merge_and_unload().eval())
    said = ", ".join(f"{way} {value:.4f}" for way, value in found.items())
    print(f"{versions}, LoRA in {targets}: loss before {before:.4f}; tuned, {said}; eval() moved by {moved:.0e}")
    assert found["train()"] < 0.9 * before and moved < 1e-5
    assert abs(found.pop("eval()") - before) < 1e-5
    assert all(abs(value - found["train()"]) < 1e-4 for value in found.values())
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" -W ignore "$folder/look.py"
