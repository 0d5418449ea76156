# Every target sets up what it needs: a virtual environment in .venv, filled by pip under the pins of
# constraints.txt. Only the first one to run takes long.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Modules are compiled once, not in each of the hundred processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-wheel test-live test-lives test-engines lint docs bench clean

demo: $(READY)
	@echo "== sixteen live peers, sixteen tasks: alone, everything averaged, partial models"
	$(BIN)/gossamer demo

test: $(READY)
	@echo "== tests (make test-live and make test-lives run the ones that take minutes)"
	$(BIN)/python -m pytest -m "not live and not lives and not engines and not wheel" -n auto --dist worksteal

test-wheel: $(READY)
	@echo "== the wheel, and the Dockerfile's lines, in an empty environment"
	$(BIN)/python -m pytest -m wheel

test-live: $(READY)
	@echo "== live tests: processes killed, brokers restarted, packets lost"
	$(BIN)/python -m pytest -m live -n 2 --dist worksteal

test-lives: $(READY)
	@echo "== simulated lives: whole peers in virtual time, 300 histories"
	$(BIN)/python -m pytest -m lives tests/lives -n auto

test-engines: $(READY)
	@echo "== studies on a Dask scheduler and on a Ray cluster, both started here"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dask,ray]"
	GOSSAMER_REQUIRE_ENGINES=1 RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest -m engines

lint: $(READY)
	@echo "== ruff, then pyright"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(READY)
	@echo "== documentation: docs/_build/html/index.html (warnings and broken links are errors)"
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(READY)
	@echo "== benchmarks: every figure is a ratio against a baseline run beside it"
	$(BIN)/gossamer bench

$(READY): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (versions pinned by constraints.txt)"
	$(PYTHON) -c 'import sys; sys.exit("gossamer needs Python 3.11 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@# Networks to find parts in, for tests only; without torchvision, which the tests do without.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt timm
	@# Type checkers do not see that setuptools maps common/ to the package gossamer.
	mkdir -p $(VENV)/typing && ln -sfn ../../common $(VENV)/typing/gossamer
	@touch $(READY)

clean:
	rm -rf $(VENV) build docs/_build *.egg-info
