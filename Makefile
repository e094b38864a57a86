# Everything that a person, the hook and CI call. `make run` and `make test` install what they need.
PYTHON ?= python3
VENV   := .venv/bin
export TOKENIZERS_PARALLELISM ?= false

.PHONY: run test test-unit lint docs format install install-dev bench-engine bench-broker bench-http soak chaos fuzz test-clients lock clean help

help:
	@echo "make run | test | test-unit | lint | format | bench-engine | bench-broker | bench-http | soak | chaos | fuzz | test-clients | clean"

install:
	@$(PYTHON) tools/install.py run

install-dev:
	@$(PYTHON) tools/install.py run dev

run: install
	@$(VENV)/python tools/run.py

test: install-dev
	$(VENV)/pytest tests

test-unit: install-dev
	$(VENV)/pytest tests/unit

lint: install-dev
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/python -m tools.document --check
	$(VENV)/python -m tools.shape

docs: install-dev
	$(VENV)/python -m tools.document

format: install-dev
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

# Benchmarks install their peers into environments of their own, and write benchmarks/results/*.json.
bench-engine: install-dev
	$(VENV)/python benchmarks/bench_engine.py

bench-broker: install-dev
	$(VENV)/python benchmarks/bench_broker.py

bench-http: install-dev
	$(VENV)/python benchmarks/bench_http.py

# Longer versions of what tests/system runs: minutes of load with kills; every kill five times as often.
soak: install-dev
	$(VENV)/python -m tests.system.soak --minutes 30

chaos: install-dev
	CHAOS=5 $(VENV)/pytest tests/system/test_kills.py

# OpenAI's API as other people's clients use it, in an environment of their own.
test-clients: install-dev
	test -d benchmarks/.venv-clients || $(PYTHON) -m venv benchmarks/.venv-clients
	benchmarks/.venv-clients/bin/pip install -q litellm==1.110.2 langchain-openai==1.7.4
	$(VENV)/pytest tests/integration/test_http_more_clients.py

fuzz: install-dev
	LOADONCE_HTTP_CASES=10000 $(VENV)/pytest tests/fuzz tests/integration/test_http_schema.py

lock:
	$(PYTHON) -m tools.lock

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
