# Everything that a fresh machine needs: `make train`, `make test`. Only Python 3.11+ and a package index are assumed.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train study test test-all test-busy test-mutants test-gpu test-browser test-frameworks test-trackers test-clusters scripts screenshot bench clean

train: .venv/installed
	@task=mnist; why=$$($(BIN)/python -c 'from distbelief.tasks import available; print(available("mnist") or "")'); \
	if [ -n "$$why" ]; then echo "training on digits, since there is $$why"; task=digits; fi; \
	$(BIN)/distbelief train $$task downpour --replicas 2 --shards 2 --optimizer adagrad --lr 0.02 --epochs 5

# many processes are started: compiled modules are kept, whatever the environment says
test test-all test-busy test-mutants: export PYTHONDONTWRITEBYTECODE :=

# what a newcomer and CI run; `pytest` alone runs one case of each test that takes no process and is not long
test: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy & checked=$$!; $(BIN)/pytest --doctest-modules distbelief benchmarks; status=$$?; wait $$checked && exit $$status
	DISTBELIEF_SEEDS=50 $(BIN)/pytest -n 2 --dist worksteal
	$(BIN)/pytest -n 4 --dist worksteal -m "not long" tests/processes

# every sweep, kill and mutant, and the slow tests: an hour or two; again goes on where it was
test-all: .venv/tools
	PYTHONPATH=tests $(BIN)/python -m rings all

# the tests with processes 20 times, and `make test` three times, while both cores are busy; again goes on where it was
test-busy: .venv/tools
	PYTHONPATH=tests $(BIN)/python -m rings busy

# a change of the code that no test notices fails it; MUTANTS names some, else all are tried; again goes on where it was
test-mutants: .venv/tools
	PYTHONPATH=tests $(BIN)/python -m mutants $(MUTANTS)

test-gpu: .venv/tools
	$(BIN)/pytest tests/gpu

# the pages of a report and of a run in headless Chromium, which root has installed for it
test-browser: .venv/browser
	@command -v chromium > /dev/null || { echo "test-browser needs chromium: install it, or run this as root" >&2; exit 1; }
	$(BIN)/pytest -rs tests/slow/test_study_page.py tests/slow/test_live_page.py

# the picture of the README: the page of a job that trains here for a minute
screenshot: .venv/browser
	PYTHONPATH=tests $(BIN)/python -m screenshot docs/watch.png

# ways to train MNIST beside each other, some five minutes; again goes on where it was
study: .venv/installed
	$(BIN)/distbelief study small

# the hook inside Lightning, transformers and Accelerate, which are installed for it; and their plain scripts beside it
test-frameworks: .venv/frameworks
	$(BIN)/pytest tests/frameworks
	$(BIN)/python recipes/scripts/run.py --frameworks

# jobs that MLflow, Weights & Biases and Aim follow, without a network; they are installed for it
test-trackers: .venv/trackers
	$(BIN)/pytest tests/trackers

# jobs on four hosts by every engine: network namespaces of this machine, which only root may make; tests whose tools
# are missing are skipped, and where all are it fails
test-clusters: .venv/clusters
	$(BIN)/pytest -rs tests/clusters

# plain scripts and the same ones on two replicas: lines, results and speed of both, with three seeds, some 5 minutes
scripts: .venv/installed
	$(BIN)/python recipes/scripts/run.py

bench: .venv/installed
	$(BIN)/python -m benchmarks wire
	$(BIN)/python -m benchmarks train

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# torch is named by itself: as a mere dependency its default build comes with gigabytes of GPU packages
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "distbelief needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[digits]'
	@touch $@

.venv/tools: .venv/installed
	$(PIP) --editable '.[digits,plots,dev]'
	@touch $@

.venv/browser: .venv/tools
	if ! command -v chromium > /dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	apt-get update --quiet --quiet; apt-get install --yes --quiet --no-install-recommends chromium; fi
	$(PIP) --editable '.[digits,plots,dev,browser]'
	@touch $@

.venv/frameworks: .venv/tools
	$(PIP) --editable '.[frameworks]'
	@touch $@

.venv/trackers: .venv/tools
	$(PIP) --editable '.[mlflow,wandb,aim]'
	@touch $@

ENGINES := iproute2 openssh-server openssh-client slurmctld slurmd slurm-client munge openmpi-bin libfaketime

.venv/clusters: .venv/tools
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	apt-get update --quiet --quiet; apt-get install --yes --quiet --no-install-recommends $(ENGINES); fi
	$(PIP) --editable '.[digits,plots,dev,ray]'
	@touch $@
