#!/usr/bin/env bash
# Installs the wheel as README says, in three new environments, and runs each of README's four blocks there as it stands.
# `make package` calls it. It downloads PyTorch and JAX, and compiles the kernels of the C block: ten minutes on two cores.
# PYTHON: the interpreter, 3.12 or newer for JAX. FOLDER: where to work, a temporary folder by default.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
folder=${FOLDER:-$(mktemp -d)}
unset PYTHONPATH TRITON_INTERPRET
export PYTHONDONTWRITEBYTECODE=1
mkdir -p "$folder"
cd "$folder"

"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir . "$root"
wheel=$(ls flashtile-*.whl)
"$python" - "$root/README.md" <<'CODE'
import re, sys
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
blocks = re.findall(r"^```(python|c)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
torch, flash_attn, jax, c = (code for _, code in blocks)
Path("torch.block.py").write_text(torch)
Path("flash_attn.block.py").write_text(flash_attn + "\nassert out.shape == q.shape\n")
Path("jax.block.py").write_text(jax + "\nassert dq.shape == q.shape\n")
Path("attend.c").write_text(c)
(command,) = re.findall(r"`(flashtile export [^`]*)`", text)
Path("export.sh").write_text(command + "\n")
CODE

installed() { # EXTRA: an environment with the wheel and that extra alone
    "$python" -m venv --clear "env-$1"
    "env-$1/bin/python" -m pip --disable-pip-version-check install --quiet "./$wheel[$1]"
}
timed() { # NAME COMMAND...: runs it, says how long it took
    local name=$1 start=$SECONDS
    shift
    "$@" >"$name.log" 2>&1 || { tail -20 "$name.log" >&2; echo "$name: failed" >&2; exit 1; }
    echo "$name: $((SECONDS - start)) s"
}
timed "install [torch]" installed torch
timed "PyTorch block" env-torch/bin/python torch.block.py
timed "flash_attn block" env-torch/bin/python flash_attn.block.py
if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    timed "install [jax]" installed jax
    timed "JAX block" env-jax/bin/python jax.block.py
    ! env-jax/bin/python -c 'import torch' 2>/dev/null # JAX alone is enough
else
    echo "JAX: left out, it needs Python 3.12"
fi
timed "install [export]" installed export
! env-export/bin/python -c 'import torch' 2>/dev/null # so is Triton, for C
PATH="$folder/env-export/bin:$PATH" timed "flashtile export" bash export.sh
timed "C block" "${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror -I. -c attend.c -o attend.o
printf 'int main(void) { return 0; }\n' >main.c
timed "C library" "${CC:-cc}" main.c attend.o flashtile_attention.c -o program -ldl -lpthread
./program
echo "README's four blocks: passed"
