# The two commands are `make reproduce` and `make test`; each sets up what it needs, once. Set-up itself is
# repro/setup/bootstrap.py, so that it also works without make: see README.md. Paths are relative, so any folder name will do.

SCALE ?= paper
CONDA_NAME := $(shell sed -n 's/^name: *//p' environment.yml)
ifeq ($(CONDA_DEFAULT_ENV),$(CONDA_NAME))
ENVIRONMENT := $(CONDA_PREFIX)
else
ENVIRONMENT := .venv
endif
PY := $(ENVIRONMENT)/bin/python
light := $(if $(filter-out 0,$(LIGHT)),--light)
# A finished environment's own Python needs no search; PYTHON=... asks for another one.
READY := $(if $(shell ls "$(ENVIRONMENT)"/.ready-* 2>/dev/null),"$(PY)")
PYTHONS := $(if $(PYTHON),"$(PYTHON)",$(READY) python3 python3.12 python3.11 python3.13 python)
# Run the arguments with the first of them that is new enough.
define with_python
found=; for candidate in $(PYTHONS); do \
  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
done; \
if [ -z "$$found" ]; then \
  echo "error: Python 3.11 or newer is needed, and" $(PYTHONS) "is not; install one, or name it: make PYTHON=/path/to/python" >&2; \
  exit 2; \
fi; \
"$$found"
endef

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help reproduce test fuzz oracle determinism architectures bench lab doctor setup model explorer clients clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22
	@echo
	@echo "  SCALE=paper       the paper's own size, some 15 minutes on two cores; or smoke: everything in four at most"
	@echo "  ONLY=\"NAME ...\"   only these experiments, named as in experiments/ (default: all)"
	@echo "  LENGTHS=FILE.csv  prompt and output lengths of your own (default: the embedded ones)"
	@echo "  JOBS=N            worker processes (default: one a core)"
	@echo "  POOL=ADDRESS      compute on the workers of a Dask scheduler (docs/experiments.md says how)"
	@echo "  BUDGET=2h         with a GPU: time for measuring on it first (default: 2h; 0 for none)"
	@echo "  TESTS=\"FILE ...\"  only these tests (default: all)"
	@echo "  RUNS=20000 SEED=0 of make fuzz; RUNS=1000 SEED=0 of make oracle"
	@echo "  REQUESTS=1000 STREAMS=4 of make clients"
	@echo "  HUB=0             or 1: allow the Hugging Face hub"
	@echo "  LIGHT=0           or 1: set up without torch; what runs real models is left out"
	@echo "  PYTHON=PATH       the Python for set-up, 3.11 or newer (default: python3)"

reproduce: setup ## compute every experiment, draw every figure, judge every claim -> figures/index.html
	@"$(PY)" -m repro reproduce --scale "$(SCALE)" $(if $(LENGTHS),--lengths "$(LENGTHS)") \
	  $(if $(ONLY),--only $(ONLY)) $(if $(JOBS),--jobs "$(JOBS)") $(if $(POOL),--pool "$(POOL)")

test: setup ## the whole test suite, the smoke-scale reproduction included
	@"$(PY)" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

fuzz: setup ## random runs of the whole engine, each checked at every step (RUNS=20000, SEED=0)
	@"$(PY)" tests/fuzz.py --runs "$(or $(RUNS),20000)" --seed "$(or $(SEED),0)"

oracle: setup ## memory and schedulers beside published vLLM, which is fetched by name (RUNS=1000, SEED=0)
	@"$(PY)" tests/oracle.py --runs "$(or $(RUNS),1000)" --seed "$(or $(SEED),0)"

clients: setup ## published clients, fetched by name, at a server of ours: lengths and times (REQUESTS=1000, STREAMS=4)
	@"$(PY)" tests/clients.py --requests "$(or $(REQUESTS),1000)" --streams "$(or $(STREAMS),4)"

determinism: setup ## everything at SCALE=smoke in three ways: equal bytes (ONLY as above)
	@"$(PY)" tests/determinism.py $(if $(ONLY),--only $(ONLY))

architectures: setup ## every decoder of the installed transformers, tiny: equal to its generate, or refused at load
	@"$(PY)" tests/architectures.py $(if $(ONLY),--only $(ONLY))

bench: setup ## how fast the simulator is; on a GPU also kernels, end to end and serving (10 minutes)
	@"$(PY)" -m repro bench

lab: ## working copies of the notebooks in JupyterLab (LAB="--no-browser --port 8889")
	@$(with_python) -m repro.setup.bootstrap $(light) lab $(LAB)

doctor: ## what this machine has, and what can and cannot run on it and why
	@$(with_python) -m repro.setup.doctor

setup: ## only the set-up that all of these begin with (LIGHT=1: without torch)
	@$(with_python) -m repro.setup.bootstrap $(light)

model: ## fetch the embedded small model again, if set-up could not
	@$(with_python) -m repro.setup.bootstrap model

explorer: setup ## build figures/explorer.html again, with the interpreter that npm has
	@command -v npm >/dev/null || { echo "error: npm is needed; install it, or use python -m repro explore" >&2; exit 2; }
	@rm -rf results/pyodide && mkdir -p results/pyodide
	@cd results/pyodide && npm pack --silent pyodide@0.29.5 >/dev/null && tar -xzf pyodide-*.tgz
	@"$(PY)" -m repro explore --interpreter results/pyodide/package

clean: ## remove results and caches; figures and the environment stay
	@rm -rf results .pytest_cache .ruff_cache .hypothesis build *.egg-info
	@find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +
