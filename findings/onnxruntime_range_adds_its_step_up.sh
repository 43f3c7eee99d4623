#!/usr/bin/env bash
# onnxruntime 1.32.0 and onnx 1.23.2, CPU: Range adds its step up instead of multiplying it, so that 32,768 positions end five steps away.
#
# ONNX defines Range by output[i] = start + i * delta. onnxruntime adds delta to a running float32 number, and every addition rounds,
# mostly to the same side. With a step of 1/3, as positions are squeezed to three times a model's length, the last of 32,768 is off by 4.8
# steps, with 0.1 by 8.5. Steps of 1 and 0.25 are added up exactly, so that a test with those sees nothing. The evaluator of the onnx package
# stays within 0.002 steps, torch.arange, which torch.onnx.export makes a Range of, within 0.003. The highest frequency of a rotary embedding
# turns by one radian a position: such an exported model has other angles at its far end. Range of integers, times the step, is right.
#
# Seen here: the largest error by step and length, in both, in steps, and the cosines of positions. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
steps (float limit, float delta, int64 n) => (float[n] added, float[n] multiplied) {
    zero = Constant<value = float {0}>()
    none = Constant<value = int64 {0}>()
    one = Constant<value = int64 {1}>()
    added = Range(zero, limit, delta)
    whole = Range(none, n, one)
    numbers = Cast<to = 1>(whole)
    multiplied = Mul(numbers, delta)
}""")
onnx.checker.check_model(model)
runtime = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
versions = f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}"
for delta in (1.0, 0.25, 1 / 3, 0.1):
    for n in (4096, 32768):
        step = np.float32(delta)
        feed = dict(limit=np.array((n - 0.5) * step, np.float32), delta=np.array(step), n=np.array(n))
        exact = np.arange(n) * np.float64(step)
        results = ReferenceEvaluator(model).run(None, feed) + runtime.run(None, feed)
        assert all(r.dtype == np.float32 and r.shape == (n,) for r in results)
        evaluator, _, added, multiplied = (float(np.abs(r - exact).max() / step) for r in results)
        turned = float(np.abs(np.cos(results[2].astype(np.float64)) - np.cos(exact)).max())
        print(f"{versions}, {n} positions of {delta:.3g}: evaluator off by {evaluator:.2g} steps, runtime by {added:.2g}, its cosines by {turned:.2g};")
        print(f"    integers times the step, in the runtime, by {multiplied:.2g} steps")
        assert max(evaluator, multiplied) < 0.002, results
        wrong = 0.0 if delta in (1.0, 0.25) else 0.05 if n == 4096 else 4.0
        assert added >= wrong and (added == 0) == (wrong == 0) and (wrong < 4 or turned > 0.5), (added, turned)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.3.5 ml_dtypes==0.6.0
"$folder/venv/bin/python" -W ignore "$folder/look.py"
