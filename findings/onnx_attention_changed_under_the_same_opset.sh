#!/usr/bin/env bash
# ONNX, onnx 1.18.0 to 1.23.2 and onnxruntime 1.23 to 1.32, CPU: Attention of opset 23 became another function under the same number.
#
# An opset's number is a promise: a model that says 23 keeps its meaning. Attention with a softcap and hidden keys does not. In
# the evaluators of onnx 1.18.0 to 1.21.0 scores get their mask first and the cap then, which makes -inf of a hidden key
# -softcap: a causal model looks ahead. Since onnx 1.22.0 the same node, of opset 23 as of 24, caps first and hides then. Runtimes
# moved, too: onnxruntime 1.26.0 computes the old function, 1.27.0 the new one. Nothing in the model says which is meant, and nothing
# warns.
#
# Seen here: the same bytes of one model in two releases of the evaluator and of the runtime; how far a change of the last key
# and value moves the queries before it, which by its causal mask is nothing. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/make.py" <<'PY'
import sys

import onnx
from onnx import TensorProto, helper

info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 8, 16]) for name in "qkvy"]
node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1, softcap=2.0)
graph = helper.make_graph([node], "attention", info[:3], info[3:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
onnx.checker.check_model(model)
onnx.save(model, sys.argv[1])
PY
cat >"$folder/look.py" <<'PY'
import sys

import numpy as np

path, expected = sys.argv[1], sys.argv[2]
if expected.startswith("onnxruntime"):
    import onnxruntime

    run, name = onnxruntime.InferenceSession(path).run, f"onnxruntime {onnxruntime.__version__}"
else:
    import onnx
    from onnx.reference import ReferenceEvaluator

    run, name = ReferenceEvaluator(path).run, f"onnx {onnx.__version__}'s evaluator"
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 16)).astype(np.float32)
before = run(None, dict(q=q, k=k, v=v))[0]
k[:, :, -1], v[:, :, -1] = 0.0, 10.0
after = run(None, dict(q=q, k=k, v=v))[0]
moved = float(np.abs(after - before)[:, :, :-1].max())
print(f"{name}: the last key moves queries before it by {moved:.2f}")
assert (moved > 1.0) == expected.endswith("leaks"), moved
PY
try() { # packages, what is expected
    rm -rf "$folder/venv"
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet numpy==2.3.5 "$1"
    [ -f "$folder/model.onnx" ] || "$folder/venv/bin/python" "$folder/make.py" "$folder/model.onnx"
    "$folder/venv/bin/python" "$folder/look.py" "$folder/model.onnx" "$2"
}
try onnx==1.21.0 "onnx leaks"
try onnx==1.22.0 "onnx hides"
try onnxruntime==1.26.0 "onnxruntime leaks"
try onnxruntime==1.27.0 "onnxruntime hides"
