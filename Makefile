# Each target works on a fresh clone and is quick the second time.
PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # images set it; workers and commands started by tests would compile every module again

.PHONY: setup demo test test-clients test-arm test-kernels test-ray test-systems check docs dist wheels images packages clean gpu-archs

setup: .venv/.ready
.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps dflash==0.1.0 speculators==0.9.0  # references of tests alone
	touch $@

demo: setup
	$(BIN)/outrider demo

# A core each: two workers. Unit tests share little, so a worker that is done takes half of what is left to the other;
# elsewhere whole files, so that what a module sets up (servers, models) is set up once, in the order of their folders:
# by number of tests, as xdist sorts them, files of few long tests come last and one worker waits for the other.
TESTS := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

check: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/python tools/clarity.py
	$(TESTS) --dist worksteal tests/unit

test: check
	$(TESTS) --dist loadfile --no-loadscope-reorder tests/e2e tests/property tests/parity
	$(BIN)/python tests/matrix.py

# Well-known clients as they are, against a server with a tiny model: Python's, and the Vercel AI SDK (needs node).
test-clients: setup
	$(BIN)/pip install -q --disable-pip-version-check -e '.[clients]'  # without constraints: they need an older openai and rich
	cd tests/clients && npm install --no-package-lock --no-audit --no-fund --silent
	$(BIN)/pytest -rs tests/e2e/test_clients.py tests/clients

# Every family of CPU kernels on Linux, as Windows programs under Wine and for ARM under qemu: the same bits for every
# compiler and system (wine, qemu-user-static, libc6-arm64-cross; half an hour, less with wheels in dist/).
test-kernels: setup
	$(BIN)/python tests/systems/kernels.py

# ARM under qemu: kernels beside their definitions, by GCC (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user), and
# with the wheel a whole Debian: `outrider demo` and a hundred tests (root rights, debootstrap, qemu-user-static; hours).
test-arm: setup
	$(BIN)/python tests/arm/run.py
	$(BIN)/python tools/wheels.py linux-aarch64
	$(BIN)/python tests/arm/system.py

# Tests again without the modules, functions and files that Windows or macOS lack (minutes; tests/systems/run.py lists them).
test-systems: setup
	$(BIN)/python tests/systems/run.py

# A real Ray cluster on this machine: replicas, a kill, a rolling update, batch files (installs outrider[ray], 80 MB).
test-ray: setup
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/pytest tests/cluster

# The site, into build/site; a broken link or anchor is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet: it hides warnings from --strict too

# Wheel and source archive, into dist/. Needs a C compiler and two small packages, not the tools of `setup`.
dist:
	rm -rf dist build/lib build/bdist.*
	test -x build/tools/bin/python || $(PYTHON) -m venv build/tools
	build/tools/bin/pip install -q --disable-pip-version-check -c constraints.txt build 'setuptools>=77'
	build/tools/bin/python -m build --no-isolation --outdir dist .

# Wheels for Linux, macOS and Windows, kernels inside, into dist/ (ziglang compiles them: 20 minutes of processor time).
wheels: setup
	$(BIN)/python tools/wheels.py

# Both container images; where no Docker answers, they are checked by a linter.
images: setup
	@if docker info >/dev/null 2>&1; then \
	  docker build -f deploy/Dockerfile.cpu -t outrider:cpu . && docker build -f deploy/Dockerfile.cuda -t outrider:cuda .; \
	else echo "no Docker answers here: the Dockerfiles are linted only"; $(BIN)/hadolint deploy/Dockerfile.cpu deploy/Dockerfile.cuda; fi

# Everything that is handed out
packages: dist images

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

# Products in every format, dense ones and attention compiled for sm_80 to sm_120, without a GPU
gpu-archs: setup
	$(BIN)/python benchmarks/gpu_archs.py --all
