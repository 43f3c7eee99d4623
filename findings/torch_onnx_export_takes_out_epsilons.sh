#!/usr/bin/env bash
# PyTorch 2.13.0, onnxscript 0.7.2 and onnxruntime 1.32.0, CPU: torch.onnx.export takes `+ 1e-8` out of a model, so that it returns infinity and NaN.
#
# The exporter ends with onnxscript's optimizer, which removes x + 0, x - 0, x * 1 and x / 1. It takes any scalar up to 1e-8 for 0, and any
# within 1e-5 of 1 for 1. Guards are as small as that: log(p + 1e-8), x / (norm + 1e-8), x * rsqrt(mean(x * x) + 1e-8), and all with 1e-12. Of
# ordinary inputs the model and its export agree, so a comparison of both by random numbers passes. An empty row, a padded token or a
# probability of 0 then makes -inf or NaN where the model has a finite number. 2e-8 is kept, and optimize=False keeps everything.
#
# Seen here: the model, the export and the export with optimize=False of a row of zeros and of ones; the nodes. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import logging

import numpy as np
import onnxruntime
import onnxscript
import torch

logging.disable(logging.WARNING)


class Guarded(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, p):
        share = p / (p.sum(-1, keepdim=True) + self.eps)
        return torch.log(p + self.eps), share, p * torch.rsqrt(p.square().mean(-1, keepdim=True) + self.eps)


versions = f"torch {torch.__version__}, onnxscript {onnxscript.__version__}, onnxruntime {onnxruntime.__version__}"
inputs = {"ones": torch.ones(1, 4), "zeros": torch.zeros(1, 4)}
for eps in (2e-8, 1e-8, 1e-12):
    model = Guarded(eps)
    for optimize in (True, False):
        program = torch.onnx.export(model, (inputs["ones"],), dynamo=True, optimize=optimize, verbose=False)
        adds = sum(node.op_type == "Add" for node in program.model.graph)
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
        for kind, p in inputs.items():
            theirs = [float(out[0, 0]) for out in model(p)]
            found = [float(out[0, 0]) for out in session.run(None, {session.get_inputs()[0].name: p.numpy()})]
            print(f"{versions}, eps {eps:g}, optimize={optimize}, {adds} Add nodes, of {kind}:")
            print(f"    log, share and norm {np.round(found, 4)}, in PyTorch {np.round(theirs, 4)}")
            lost = optimize and eps <= 1e-8
            assert adds == (0 if lost else 3) and np.isfinite(theirs).all(), adds
            if lost and kind == "zeros":
                assert found[0] == -np.inf and np.isnan(found[1:]).all(), found
            else:
                assert np.allclose(found, theirs, rtol=1e-5), (found, theirs)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
