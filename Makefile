# Each target works from a fresh clone: it makes what it needs. It requires only Python 3.11 or newer, pip, make and gcc.

PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip --quiet --quiet --disable-pip-version-check
EXTRAS := client,server,s3,access,test,test-trainers,dev,demo
BENCH := bench,bench-webdataset,bench-litdata,bench-memcached,bench-redis
EVERYTHING := $(EXTRAS),fuzz,$(BENCH)
BENCH_STAMP := $(VENV)/.bench
MDS := $(VENV)/mds
SECONDS ?= 3600
PYTEST_ARGS ?= -n 2 --dist loadfile
# The requirements of the extras $(1), one per line. pip builds packages that have no wheel (one test tool has none) in
# isolation, each with its own build backend; only the project itself is built with the pinned, installed backend.
REQUIREMENTS = $(PYTHON) -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = [project["optional-dependencies"][name] for name in sys.argv[1].split(",")]; \
	print(*project["dependencies"], *sum(extras, []), sep="\n")' $(1)
PROJECT := --no-deps --no-build-isolation -e .

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install check format test chaos faults planted soak fuzz demo bench imports audit sbom build constraints clean simulate

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP)  ## Create .venv and install everything; repeated only if the requirements or the native code change

$(STAMP): pyproject.toml constraints.txt hatch_build.py client/quiver_client/native/pieces.c
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one with PYTHON=..." >&2; exit 1; }
	@echo "Installing into $(VENV), which takes a minute or two ..."
	@$(PYTHON) -m venv $(VENV)
	@$(call REQUIREMENTS,$(EXTRAS)) >$(VENV)/requirements.txt
	@$(PIP) install -c constraints.txt -r $(VENV)/requirements.txt
	@$(PIP) install $(PROJECT)
	@touch $@

check: $(STAMP)  ## Check lint, formatting, types, which package may import which, and known vulnerabilities
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python .ci/audit.py

format: $(STAMP)  ## Format, and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: $(STAMP)  ## Run the tests, two files at a time; PYTEST_ARGS='-k ring -x' selects some
	$(BIN)/pytest $(PYTEST_ARGS)

chaos: $(STAMP)  ## Inject faults into running racks; QUIVER_CHAOS_SEED=7 replays a run
	$(BIN)/pytest $(PYTEST_ARGS) -m chaos

faults: $(STAMP)  ## Run every test of the fault matrix; print which rows survived
	$(BIN)/pytest $(PYTEST_ARGS) -m fault --faults

HOURS ?= 1
SEED ?=
soak: $(STAMP)  ## Train while everything fails at random, for HOURS=1; SEED=7 replays a run
	$(BIN)/python -m tests.chaos.soak --hours $(HOURS) $(if $(SEED),--seed $(SEED))

fuzz: $(STAMP)  ## Fuzz every parser; SECONDS=3600 in all, shared by the targets, two at a time
	@$(PIP) install -c constraints.txt $$($(call REQUIREMENTS,fuzz)) \
		|| echo "make: atheris cannot be installed here; fuzzing by mutation alone" >&2
	$(BIN)/python -m tests.fuzz --guided --seconds $(SECONDS) $(FUZZ_ARGS)

planted: $(STAMP)  ## Plant each of a list of bugs in a copy of the sources; a test must catch it
	$(BIN)/python -m tests.planted

SEEDS ?= 10000
simulate: $(STAMP)  ## Simulate racks, jobs and faults under virtual time; SEEDS=10000
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs 2

demo: $(STAMP)  ## Train a small network through etcd and three daemons, one of which is killed during training
	@$(BIN)/python examples/demo.py

bench: $(BENCH_STAMP)  ## Compare Quiver with other systems; BENCH_ARGS=--quick only checks that the bench runs
	$(BIN)/python -m bench all --python mds=$(MDS)/bin/python $(BENCH_ARGS)

# The packages of the compared systems; one of them in an environment of its own (pyproject.toml says why). The servers
# memcached, redis-server and nginx are the system's packages; the report lists those that are not installed.
$(BENCH_STAMP): $(STAMP)
	@echo "Installing the compared systems, which takes a few minutes ..."
	@$(call REQUIREMENTS,$(BENCH)) >$(VENV)/bench.txt
	@$(PIP) install -c constraints.txt -r $(VENV)/bench.txt
	@$(BIN)/python -m venv $(MDS)
	@$(call REQUIREMENTS,bench-mds) >$(MDS)/requirements.txt
	@$(MDS)/bin/pip -qq install hatchling editables "$$(grep '^torch==' constraints.txt)"
	@{ $(MDS)/bin/pip -qq install -r $(MDS)/requirements.txt && $(MDS)/bin/pip -qq install $(PROJECT); } \
		|| echo "make: the packages of MDS cannot be installed here; the report will say so" >&2
	@touch $@

imports: $(STAMP)  ## List which part of the code imports which, and draw the graph to dist/imports.svg
	@mkdir -p dist
	@$(BIN)/python -m bench.imports --svg dist/imports.svg

audit: $(STAMP)  ## Fail if a pinned version has a known vulnerability (skipped where no service answers)
	@$(BIN)/python .ci/audit.py --strict

sbom: $(STAMP)  ## Write the components of the environment to dist/sbom.cdx.json (CycloneDX)
	@mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o dist/sbom.cdx.json $(BIN)/python

build: $(STAMP)  ## Build the wheel into dist/
	$(BIN)/python -m hatchling build --target wheel

constraints:  ## Resolve every extra in a clean environment and pin the result
	@set -e; clean=$$(mktemp -d); trap 'rm -rf "$$clean"' EXIT; \
	torch=$$(grep '^torch==' constraints.txt); mds=$$(grep '^mosaicml-streaming==' constraints.txt); \
	$(PYTHON) -m venv "$$clean"; \
	$(call REQUIREMENTS,$(EVERYTHING)) >"$$clean/requirements.txt"; \
	"$$clean/bin/pip" -qq install "$$torch" -r "$$clean/requirements.txt"; \
	{ sed -n '/^#/p' constraints.txt; \
	  { "$$clean/bin/pip" freeze --exclude-editable | sed '/^#/d; s/^\(torch==[0-9.]*\)+.*/\1/'; echo "$$mds"; } \
	    | LC_ALL=C sort -f; } >"$$clean/constraints.txt"; \
	cp "$$clean/constraints.txt" constraints.txt

clean:  ## Remove everything that was built, .venv included
	rm -rf $(VENV) .ci/machine dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
