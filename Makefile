# make demo   sets everything up and runs the main job
# make test   sets everything up and passes the tests
# make test-all   also runs the slow tests, repeats those that start processes, and runs other SDKs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all qa flaky kills bench compat docs uplot screenshots format clean

demo: $(VENV)/.demo
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=1000 $(BIN)/python examples/demo.py

test: qa

# Everything that `make test` checks, with more examples and seeds, and what takes hours.
test-all: $(VENV)/.ready
	PYTHON=$(PYTHON) scripts/install-vllm.sh .vllm
	HYPOTHESIS_PROFILE=nightly VENV=$(VENV) RINGS=all scripts/qa.sh
	$(MAKE) kills RAY=1
	$(MAKE) kills ENGINE=local KILLS=25
	$(MAKE) flaky compat

qa: $(VENV)/.ready
	VENV=$(VENV) scripts/qa.sh

# ROUNDS=3, MINUTES=20, ONLY="tests/acceptance" run less; LOGS=directory keeps the logs there.
flaky: $(VENV)/.ready
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.flakes $(ONLY) \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(LOGS),--logs $(LOGS))

# KILLS=1000 kills more, RAY=1 runs the workers on Ray, ENGINE=local trains with PyTorch, LOGS=directory keeps the logs there.
kills: $(VENV)/.ready
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.kills \
		$(if $(KILLS),--kills $(KILLS)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(RAY),--ray) $(if $(LOGS),--logs $(LOGS))

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

# VERSIONS="0.12.0 0.36.0", ONLY=sdks or ONLY=cookbook runs a part; RESUME=1 keeps what has results.
compat: $(VENV)/.ready
	$(BIN)/python -m tests.compat --versions "$(VERSIONS)" --only "$(ONLY)" $(if $(RESUME),--resume)

docs: $(VENV)/.docs
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --clean --strict

# The charting library of the dashboard: VERSION=1.6.32 fetches a version, otherwise its digests are checked.
uplot: $(VENV)/.ready
	$(BIN)/python scripts/update_uplot.py $(VERSION)

# The pictures of the README and docs; NAME=playground takes those with this word in their name.
screenshots: $(VENV)/.ready
	$(BIN)/python scripts/screenshots.py $(NAME)

format: $(VENV)/.ready
	$(BIN)/ruff check --fix src tests trainer examples benchmarks docs
	$(BIN)/ruff format src tests trainer examples benchmarks docs

# torch goes first, alone and pinned: a later resolution must not pull another build.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time)"
	PYTHON=$(PYTHON) scripts/system-packages.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	scripts/install-torch.sh $(BIN)/python $(TORCH)
	$(PIP) -e '.[dev]'
	@touch $@

# What the demo needs, which is less than the tests need: nothing if they are set up already.
IS_SET_UP := test $(VENV)/.ready -nt pyproject.toml -a $(VENV)/.ready -nt constraints.txt
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(IS_SET_UP) || echo "Setting up $(VENV) (a minute or two the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(IS_SET_UP) || scripts/install-torch.sh $(BIN)/python $(TORCH)
	@$(IS_SET_UP) || $(PIP) -e '.[server,text,torch]' peft
	@touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(PIP) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .vllm .cache .compat build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
