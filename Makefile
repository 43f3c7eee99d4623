# Every target sets itself up: .venv is built at first, and brought up to date when pyproject.toml changes.
TORCH ?= torch==2.13.0
PYTHON ?= python3
JOBS ?= 2
SUITES ?= smoke
PY := .venv/bin/python
NEWEST := .venv/newest-triton
unexport PYTHONDONTWRITEBYTECODE # tests are many processes: without bytecode each would compile PyTorch's sources anew

.PHONY: demo test quick jax check compile gpu bench docs site package

demo: .venv/.demo
	$(PY) -m flashtile demo

test: .venv/.ready
	$(PY) -m pytest -n $(JOBS) --dist worksteal

# Two minutes, for who changes one file: the tests that begin no other process, interpret no kernel and compile none.
QUICK := tests/spec tests/reference tests/test_layout.py tests/test_memory.py tests/test_errors.py tests/test_explanation.py \
  tests/export/test_size.py gluon_emulator/tests tests/torch/test_prepared.py tests/torch/test_lengths.py \
  tests/torch/test_arguments.py tests/companions/test_modules.py tests/kernels/test_cpu_region.py
quick: .venv/.ready
	$(PY) -m pytest -q -n $(JOBS) $(QUICK)

# flashtile.jax, in an environment of its own: its types, then its tests, compiled and interpreted. Says so where there is no
# Python for it.
jax:
	@if $(MAKE) --no-print-directory .venv-jax/.ready; then bash tools/test_jax.sh $(JOBS); else [ ! -d .venv-jax ]; fi

check: .venv/.ready
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pyright --pythonpath $(PY)
	.venv/bin/lint-imports
	$(PY) tools/check_size.py
	$(PY) tools/check_cycles.py

compile: .venv/.ready
	$(PY) -m flashtile.audit.matrix --jobs $(JOBS)
	[ ! -d $(NEWEST) ] || PYTHONPATH=$(NEWEST) $(PY) -m flashtile.audit.matrix --jobs $(JOBS)
	TRITON_INTERPRET=0 $(PY) benchmarks/tiles.py --list sm90 --known benchmarks/results/tiles-h200.csv
	$(PY) -m pytest -n $(JOBS) -m whole tests/compile tests/hopper tests/export tests/cached

gpu: .venv/.ready
	$(PY) -c "import torch; raise SystemExit(None if torch.cuda.is_available() else 'PyTorch sees no GPU here.')"
	$(PY) -m pytest -m gpu
	$(PY) benchmarks/accuracy.py --output bench-output/accuracy.csv
	$(PY) -m flashtile bench smoke

bench: .venv/.ready
	$(PY) -m flashtile bench $(SUITES)

docs: .venv/.ready
	$(PY) tools/make_docs.py

# The wheel in three clean environments, with README's four blocks: PYTHON must be 3.12 or newer for that of JAX.
package:
	PYTHON="$(PYTHON)" bash tools/try_package.sh

# The documentation site, in site/, by an environment of its own. A link that leads nowhere fails.
site: .venv-docs/.ready
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

.venv-docs/.ready: pyproject.toml | .venv/.demo
	@if [ -L .venv-docs ]; then echo ".venv-docs is a link to another checkout's, which is not touched here." >&2; exit 1; fi
	$(PY) -m venv --clear --without-pip .venv-docs
	$(PY) -m pip --disable-pip-version-check --python .venv-docs/bin/python install --quiet --no-compile --group docs
	@touch $@

.venv-jax/.ready: pyproject.toml tools/setup_jax.sh
	bash tools/setup_jax.sh
	@touch $@

.venv/.ready: pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash tools/setup.sh
	@touch .venv/.demo $@

# What the demo needs, which is a part of what the tests need.
.venv/.demo: pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash tools/setup.sh demo
	@touch $@
