"""Runs models in the onnxruntime that PYTHONPATH has: a folder with NAME.onnx and NAME-0.npz (its inputs), NAME-1.npz, ...

Writes what each gives to NAME-0.out.npy, or why it gives nothing to NAME-0.txt. Knows nothing of torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]

onnxruntime.set_default_logger_severity(4)  # not that it knows no GPU
for model in Path(sys.argv[1]).glob("*.onnx"):
    for given in model.parent.glob(f"{model.stem}-[0-9].npz"):
        try:
            session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
            feeds = dict(zip((put.name for put in session.get_inputs()), np.load(given).values(), strict=True))
            np.save(given.with_suffix(".out.npy"), session.run(None, feeds)[0])
        except Exception as error:
            given.with_suffix(".txt").write_text(str(error))
print(onnxruntime.__version__)
