# From a fresh clone, `make train` and `make test` need nothing but Python with its venv module: they set up .venv themselves.
# A stamp in .venv says which pins it was made from, so a second call starts at once.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install train pong test bench verify docs docs-serve lint lock clean
MAKEFLAGS += --no-print-directory

# Small enough for a laptop without a GPU. `make train ARGS="--seed 2"` adds flags, which override these.
TRAIN_FLAGS ?= --num-envs 32 --num-steps 64 --network nature --learning-rate 5e-4 --log-frequency 1
ARGS ?=
PORT ?= 8000

# The first one of a supported version is used; `make train PYTHON=/path/to/python3.12` names one.
PYTHON ?= python3.13 python3.12 python3.11 python3
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

install: .venv/.run-ready ## set up .venv with the pinned packages; `source .venv/bin/activate` then makes `cleanba` available
	@echo "source .venv/bin/activate"

train: .venv/.run-ready ## train PPO on Breakout for 100,000 steps; ARGS adds flags, PYTHON names the Python
	@.venv/bin/python -m cleanba ppo --env-id Breakout-v5 --total-timesteps 100000 $(TRAIN_FLAGS) $(ARGS)

pong: .venv/.run-ready ## train DQN on Pong until it wins by 18 points on average, then film it
	@.venv/bin/python -m cleanba dqn --preset pong --env-id Pong-v5 --target-return 18 --capture-video $(ARGS)

test: .venv/.dev-ready ## run the tests; ARGS goes to pytest (ARGS="-m 'not slow'", ARGS=-n0)
	@.venv/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

bench: .venv/.run-ready ## measure speed on CPUs: 15 minutes, a table and JSON in benchmarks/results/
	@.venv/bin/python benchmarks/bench.py

verify: .venv/.run-ready ## compute parts of published results again, and compare their bits; ARGS="--sample 99": all
	@.venv/bin/python benchmarks/verifiable.py $(ARGS)

docs: .venv/.docs-ready ## build the documentation into docs/_build/html; fails on broken links and forgotten pages
	@.venv/bin/python -m sphinx --fail-on-warning --fresh-env -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-serve: docs ## build the documentation and show it at http://localhost:8000; PORT names another
	@.venv/bin/python -m http.server --directory docs/_build/html --bind localhost $(PORT)

lint: .venv/.dev-ready ## check style, format, types, and that imports run downwards
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy
	@.venv/bin/lint-imports --no-logo --no-cache

lock: .venv-lock/.ready ## refresh poetry.lock and requirements/ from pyproject.toml; ARGS=--regenerate upgrades all
	@echo "Resolving the dependencies into poetry.lock"
	@$(POETRY) lock $(ARGS)
	$(call export,run,--only main --extras "hub track video")
	$(call export,dev,--with dev --extras "hub track video export")
	$(call export,docs,--with docs)

clean: ## remove .venv and every cache; runs/ stays
	@rm -rf .venv .venv-lock .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist docs/_build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.run-ready: requirements/run.txt pyproject.toml
	$(call create,.venv)
	@echo "Installing requirements/run.txt into .venv (minutes the first time)"
	$(call install,.venv,-r requirements/run.txt)
	$(call install,.venv,--no-deps --editable .)
	@rm .venv/.unfinished && touch $@

.venv/.dev-ready: requirements/dev.txt pyproject.toml
	$(call create,.venv)
	@echo "Installing requirements/dev.txt into .venv (minutes the first time)"
	$(call install,.venv,-r requirements/dev.txt)
	$(call install,.venv,--no-deps --editable .)
	@rm .venv/.unfinished && touch .venv/.run-ready $@  # dev.txt holds all of run.txt

.venv/.docs-ready: requirements/docs.txt pyproject.toml
	$(call create,.venv)
	@echo "Installing requirements/docs.txt into .venv"
	$(call install,.venv,-r requirements/docs.txt)
	$(call install,.venv,--no-deps --editable .)
	@rm .venv/.unfinished && touch $@

.venv-lock/.ready: requirements/lock.txt
	$(call create,.venv-lock)
	@echo "Installing Poetry into .venv-lock"
	$(call install,.venv-lock,-r requirements/lock.txt)
	@rm .venv-lock/.unfinished && touch $@

# create FOLDER: a working virtual environment, marked unfinished. One left unfinished, or not working, is made anew.
define create
@set -e; \
if [ -e $(1)/.unfinished ] || ! $(1)/bin/python -c 'import pip; $(FITS)' >/dev/null 2>&1; then \
	fits=; found=; \
	for python in $(PYTHON); do \
		"$$python" -c '$(FITS)' >/dev/null 2>&1 || continue; \
		fits=$$python; \
		if "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$fits" ]; then \
		echo "Cleanba needs Python 3.11, 3.12 or 3.13, but none of these is one: $(PYTHON). Name one with PYTHON=/path/to/python." >&2; exit 1; \
	elif [ -z "$$found" ]; then \
		version=$$("$$fits" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		echo "Python $$version has no venv module here: install it, for example with 'sudo apt-get install python$$version-venv'." >&2; exit 1; \
	fi; \
	echo "Creating $(1) with $$("$$found" --version)"; \
	rm -rf $(1); mkdir $(1); touch $(1)/.unfinished; \
	"$$found" -m venv $(1); \
fi; \
touch $(1)/.unfinished
endef

# install FOLDER,WHAT: by pip. If pip fails, for example without a network, the folder is as good as before; if it is
# interrupted, it may leave half a package, so the mark stays.
define install
@trap 'exit 130' HUP INT TERM; \
$(1)/bin/python -m pip -qq --disable-pip-version-check install $(2) || \
{ status=$$?; [ $$status -gt 128 ] || rm -f $(1)/.unfinished; exit $$status; }
endef

# Poetry uses the same package index as pip, mirrors included; the lock file does not name it. Only pip installs.
POETRY = POETRY_VIRTUALENVS_CREATE=false \
	POETRY_PYPI_MIRROR_URL="$${POETRY_PYPI_MIRROR_URL:-$$(.venv-lock/bin/python -c '$(INDEX)')}" \
	.venv-lock/bin/python -m poetry --no-interaction
INDEX := from pip._internal.commands import create_command as c; print(c("install").parse_args([])[0].index_url)

# export NAME,GROUPS: write requirements/NAME.txt, unless it would not change: a new file would be installed again.
define export
@echo "Exporting requirements/$(1).txt"
@{ echo "# Made by 'make lock' from poetry.lock."; \
$(POETRY) export --format requirements.txt --without-hashes --without-urls $(2); } >requirements/$(1).txt.new || \
{ rm requirements/$(1).txt.new; exit 1; }; \
if cmp -s requirements/$(1).txt.new requirements/$(1).txt; then rm requirements/$(1).txt.new; \
else mv requirements/$(1).txt.new requirements/$(1).txt; fi
endef
