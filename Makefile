# Every target sets up what it needs. Variables:
#   PYTHON=python3.12   interpreter for .venv (default: the newest supported one)
#   TORCH=cpu|cuda      torch build (default: cpu, or the build in .venv)
#   ARCH=x86_64|aarch64 target architecture of the wheelhouse
#   WORKERS=6           processes that run all tests side by side
#   CHECKERS=4          processes that run the tests of `make check`
#   ARGS="..."          passed to the command of demo, check, test, compose-test, bench and lock
PYTHON ?=
TORCH ?=
ARCH ?=
ARGS ?=
# End-to-end tests wait more than they compute: more processes than cores. The others compute, but for a few.
WORKERS ?= 6
CHECKERS ?= 4
# Tests start many processes: each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

# Any interpreter can run scripts/install.py, which then chooses the one for .venv. Some names may exist but not run.
STARTER = $(shell for p in $(PYTHON) .venv/bin/python python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null && echo "$$p" && break; done)
NO_PYTHON = no Python found: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv) or set PYTHON=...
START = $(or $(STARTER),$(error $(NO_PYTHON)))
RUN = PATH="$(CURDIR)/.venv/bin:$$PATH"
FLAVOUR = $(or $(TORCH),cpu)
IMAGE = fl-privacy:$(FLAVOUR)
# A file stays in one process, and tests/conftest.py puts the slow files first.
PYTEST = $(RUN) python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Lint runs beside the tests; what it says is printed in one piece when it ends.
BESIDE_LINT = { said=$$($(MAKE) --no-print-directory lint 2>&1); code=$$?; echo; echo "$$said"; exit $$code; } & lint=$$!;
AND_LINT = ; tests=$$?; wait $$lint || { echo "lint failed, see above"; exit 1; }; exit $$tests
ENGINE = lines=$$(scripts/engine.sh) && eval "$$lines"

.PHONY: help install demo check test test-faults bench lint proto schema lock wheelhouse image bundle compose-test clean

help:
	@echo "make install   set up .venv"
	@echo "make demo      run the quickstart federation"
	@echo "make check     lint, type checks and the tests that start no federation"
	@echo "make test      lint, type checks and all tests"
	@echo "make test-faults  kill every process at every phase; flood every listener"
	@echo "make bench     benchmarks"
	@echo "make lint      ruff and mypy"
	@echo "make proto     regenerate the code for fl_privacy/wire/*.proto"
	@echo "make schema    regenerate docs/config.md and docs/config.schema.json"
	@echo "make lock      resolve pyproject.toml again and write requirements.lock"
	@echo "make wheelhouse  download wheels into wheelhouse/ to build the image offline"
	@echo "make image     build the image fl-privacy:cpu, or :cuda with TORCH=cuda"
	@echo "make compose-test  test the federation in containers from scratch"
	@echo "make bundle    pack wheels, image and bill of materials for an offline site"
	@echo "make clean     remove .venv and everything generated; keeps runs/ and wheelhouse/"

install:
	@exec $(START) scripts/install.py --python "$(PYTHON)" --torch "$(TORCH)"

demo: install
	@$(RUN) fl-privacy up configs/quickstart.yaml --engine local $(ARGS)

check: install
	@$(BESIDE_LINT) HYPOTHESIS_PROFILE=quick $(RUN) python -m pytest -n $(CHECKERS) --dist worksteal -m "not e2e" $(ARGS) \
	$(AND_LINT)

test: install
	@$(BESIDE_LINT) $(PYTEST) $(ARGS) $(AND_LINT)

# Results are written to docs/recovery.md.
test-faults: install
	@rm -f build/faults.jsonl
	$(RUN) python -m pytest -n 2 --dist load --faults $(ARGS)
	$(RUN) python scripts/recovery.py

bench: install
	$(RUN) python -m benchmarks $(ARGS)

lint: install
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

proto: install
	$(RUN) python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. fl_privacy/wire/*.proto

schema: install
	$(RUN) python scripts/schema.py

lock: install
	$(RUN) python scripts/lock.py --python "$(PYTHON)" $(ARGS)

wheelhouse: install
	@$(RUN) python scripts/wheelhouse.py --torch "$(TORCH)" --arch "$(ARCH)"

# Containers run as a different user, who needs write access to runs/.
image:
	@mkdir -p runs && chmod a+rwx runs
	@$(ENGINE) && docker build --build-arg TORCH=$(FLAVOUR) --tag $(IMAGE) .

compose-test:
	@exec scripts/compose-test.sh $(ARGS)

# Without a container engine, the bundle has no image.
bundle: wheelhouse
	@if $(ENGINE); then docker build --quiet --build-arg TORCH=$(FLAVOUR) --tag $(IMAGE) . && image=$(IMAGE); fi && \
	$(RUN) python scripts/bundle.py --image "$$image"

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
