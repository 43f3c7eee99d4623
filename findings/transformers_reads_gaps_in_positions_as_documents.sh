#!/usr/bin/env bash
# transformers 5.24.0 and PyTorch 2.13.0, CPU: a gap in position_ids hides all tokens before it, if the call neither caches nor has a mask.
#
# Without attention_mask and with use_cache=False a model takes every step of position_ids other than +1 for the start of another document.
# So [0, 1, 2, 3, 100, 101, 102, 103] (positions skipped to train for length, tokens dropped in between) becomes two documents, and
# with [0, 2, 4, 6, ...] each token sees itself alone. use_cache=True, or a mask of ones, which hides nothing, and all see each other.
# The converse is as quiet: of positions that start anew, [0, 1, 2, 3, 0, 1, 2, 3], which is how packed rows are told, documents see each
# other under use_cache=True, the default in training mode too. Gradient checkpointing sets use_cache=False: it changes what is seen.
#
# Seen here: how far other tokens in the first half move the last logits, by positions and by call. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train()
tokens = torch.randint(0, 64, (1, 8))
others = torch.cat([(tokens[:, :4] + 7) % 64, tokens[:, 4:]], 1)
rows = {
    "one document": list(range(8)),
    "a gap": [0, 1, 2, 3, 100, 101, 102, 103],
    "every other": list(range(0, 16, 2)),
    "two documents": [0, 1, 2, 3] * 2,
}
calls = {
    "as it stands": {},
    "use_cache=True": dict(use_cache=True),
    "use_cache=False": dict(use_cache=False),
    "use_cache=False, a mask of ones": dict(use_cache=False, attention_mask=torch.ones(1, 8, dtype=torch.long)),
}
for implementation in ("sdpa", "eager"):
    model.set_attn_implementation(implementation)
    for row, positions in rows.items():
        moved = {}
        for call, keywords in calls.items():
            with torch.no_grad():
                one, other = (model(x, position_ids=torch.tensor([positions]), **keywords).logits for x in (tokens, others))
            moved[call] = (one - other)[0, -1].abs().max().item()
        said = ", ".join(f"{call} {value:.3f}" for call, value in moved.items())
        print(f"transformers {transformers.__version__}, torch {torch.__version__}, {implementation}, {row} {positions}: {said}")
        for call, value in moved.items():
            assert (value == 0) == (row != "one document" and call == "use_cache=False"), (row, call, value)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
"$folder/venv/bin/python" -W ignore "$folder/look.py"
