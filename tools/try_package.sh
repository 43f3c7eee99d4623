#!/usr/bin/env bash
# Installs the wheel as README says, in three new environments, and runs each of README's four blocks there as it stands.
# `make package` calls it. It downloads PyTorch and JAX, and compiles the kernels of the C block: ten minutes on two cores.
# PYTHON: the interpreter, 3.12 or newer for JAX. FOLDER: where to work, a temporary folder by default.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if [ -z "${FOLDER:-}" ]; then
    FOLDER=$(mktemp -d)
    trap 'rm -rf "$FOLDER"' EXIT # gigabytes
fi
folder=$FOLDER
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
extras = re.findall(r'^pip install "\.\[([\w,]+)\]"', text, re.MULTILINE)
assert [names.split(",")[0] for names in extras] == ["torch", "jax", "export"], extras
Path("extras.txt").write_text("\n".join(extras) + "\n")
CODE

installed() { # NAME: an environment with the wheel and the extras of README's line that begins with that one
    local extras
    extras=$(grep "^$1\b" extras.txt) && "$python" -m venv --clear "env-$1" &&
        "env-$1/bin/python" -m pip --disable-pip-version-check install --quiet "./$wheel[$extras]"
}
timed() { # NAME COMMAND...: runs it, says how long it took
    local name=$1 start=$SECONDS
    shift
    "$@" >"$name.log" 2>&1 || { tail -20 "$name.log" >&2; echo "$name: failed" >&2; exit 1; }
    echo "$name: $((SECONDS - start)) s"
}
absent() { # NAME ENVIRONMENT: fails where that environment can import it. (`!` alone never ends a script.)
    if "env-$2/bin/python" -c "import $1" 2>/dev/null; then echo "$1 is in the environment of [$2]" >&2; exit 1; fi
}
timed "install [torch]" installed torch
timed "PyTorch block" env-torch/bin/python torch.block.py
if grep Warning "PyTorch block.log"; then echo "README's first block warns" >&2; exit 1; fi
timed "flashtile explain" env-torch/bin/flashtile explain 'attention(q=1x4096x16x128,kv=4096x16x128,bf16,band=:0)' --device H100
timed "flash_attn block" env-torch/bin/python flash_attn.block.py
if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    timed "install [jax]" installed jax
    timed "JAX block" env-jax/bin/python jax.block.py
    absent torch jax # JAX alone is enough
else
    echo "JAX: left out, it needs Python 3.12"
fi
timed "install [export]" installed export
absent torch export # so is Triton, for C
PATH="$folder/env-export/bin:$PATH" timed "flashtile export" bash export.sh
timed "C block" "${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror -I. -c attend.c -o attend.o
printf 'int main(void) { return 0; }\n' >main.c
timed "C library" "${CC:-cc}" main.c attend.o flashtile_attention.c -o program -ldl -lpthread
./program
echo "README's four blocks: passed"
