.DEFAULT_GOAL := help
.PHONY: help setup test-tools up down static lint types test-types prose site docs quick check test sim sims mutants drill drill-counts drill-repairs drill-locks drill-bank bench budget hops loadtest snapshot-demo generate proto reference lock lowest pythons release audit format interop redis-clients schedulers

BIN := .venv/bin
# A node is 400 modules, and the tests start hundreds of nodes: without compiled files each takes 0.6 s more.
unexport PYTHONDONTWRITEBYTECODE
FAST := not (slow or sim or needs_zookeeper or needs_etcd or cluster or spark or interop)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' Makefile | while read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

setup: .venv/.ready ## install everything into .venv, tests and Spark included; quick when nothing has changed

.venv/.ready: requirements-build.lock requirements.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh

.venv/.local: requirements-build.lock requirements-local.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh --local

test-tools: ## Chromium, redis-cli and promtool for some tests, from Debian's packages, as root
	@scripts/test_tools.sh

up: .venv/.local ## start the local cluster: ZooKeeper, three nodes, three partitions
	@$(BIN)/kvstore up --detach

down: ## stop the local cluster; its data stays
	@$(BIN)/kvstore down

static: lint types test-types prose ## format, lint, types and prose

lint: setup
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: setup
	@$(BIN)/mypy

test-types: setup
	@$(BIN)/mypy --config-file tests/mypy.ini

prose: setup
	@$(BIN)/python -m scripts.prose

.venv/.docs: .venv/.ready requirements-docs.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-docs.lock
	@touch $@

site: .venv/.docs ## build the documentation into build/site; a link that leads nowhere is an error
	@mkdir -p build && NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict > build/site.log 2>&1 || { cat build/site.log; exit 1; }

docs: .venv/.docs ## serve the documentation on 127.0.0.1:8000, and build it again when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr $(or $(ADDR),127.0.0.1:8000)

quick: static ## while you work: static, and the fast tests nearest to what changed since HEAD; under a minute
	@PYTHONPATH=. $(BIN)/python scripts/quick.py -m "$(FAST)"

check: static site ## before each commit: static, the documentation, house rules and fast tests
	@$(BIN)/pytest -n 2 -m "$(FAST)"

# Each static check and the documentation use one processor, so they run two at a time, the longest first.
test: setup .venv/.docs ## everything; what CI runs
	@$(MAKE) --no-print-directory --jobs=2 --output-sync test-types site types prose lint
	@$(BIN)/pytest -n 4

sim: setup ## replay one simulated run: make sim SEED=4711; with TRACE=1 it prints every event
	@$(BIN)/python -m tests.sim.run $(SEED)

sims: setup ## thousands of simulated runs, and what struck them: make sims SEEDS=5000 FIRST=0, TRANSACTIONS=1 for transactions
	@$(BIN)/python -m tests.sim.many $(or $(SEEDS),5000) $(or $(FIRST),0) $(if $(TRANSACTIONS),--transactions)

mutants: setup ## break the code on purpose and see that a test notices; NAME=… for a part of the names
	@$(BIN)/python -m tests.mutants $(NAME)

redis-clients: setup ## the tests that redis-py and go-redis publish, and uses of libraries, against clusters; what is not here is listed with its reason
	@$(BIN)/python -m tests.redis_clients.redis_py && $(BIN)/python -m tests.redis_clients.go_redis && \
	  $(BIN)/python -m tests.redis_clients.libraries

schedulers: setup ## three nights with the examples for Airflow and Dagster, each by the real package in an environment of its own
	@$(BIN)/python -m tests.schedulers.run

interop: setup ## Apache BookKeeper's own software on our bookies and ours on its, 4.17 and 4.18; Maven fetches the jars
	@for version in $(or $(VERSION),4.17.2 4.18.0); do echo "Apache BookKeeper $$version"; \
	  export KVSTORE_INTEROP=1 KVSTORE_INTEROP_VERSION=$$version; \
	  $(BIN)/python -m tests.interop.java && $(BIN)/pytest -v --no-header tests/interop || exit 1; done

drill: setup ## accidents by seed on real processes, as root: make drill MINUTES=30 SEED=1
	@$(BIN)/python -m loadtest.drill --nemesis --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1)

drill-counts: setup ## counted kills, stops and outages, and changes of the ring under load, with the figures wanted
	@$(BIN)/python -m loadtest.drill
	@$(BIN)/python -m loadtest.ring_drill

drill-repairs: setup ## bookies destroyed, restarts, who repairs stands still, 100,000 ledgers: what auto-recovery does and how fast
	@$(BIN)/python -m loadtest.drill --repairs

drill-locks: setup ## ten thousand times a lock is taken, while clients and leaders are stopped and killed: make drill-locks SEED=1
	@$(BIN)/python -m loadtest.lock_drill --seed $(or $(SEED),1)

drill-bank: setup ## transfers over partitions while leaders die, the ring changes and snapshots are taken: make drill-bank MINUTES=10 FRONT=redis
	@$(BIN)/python -m loadtest.bank_drill --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) --front $(or $(FRONT),client)

bench: setup ## the benchmark suite, and what an operation costs
	@$(BIN)/kvstore bench suite
	@$(BIN)/python -m loadtest.budget

budget: setup ## what an operation costs, on real nodes and in a client's process: calls, syscalls, syncs, processor time
	@$(BIN)/python -m loadtest.budget
	@$(BIN)/python -m loadtest.client_budget
	@$(BIN)/python -m loadtest.transaction_budget

hops: setup ## how many calls from file to file a SET and a GET make on their way
	@PYTHONPATH=. $(BIN)/python scripts/hops.py

loadtest: setup ## two minutes of load with Locust, and a report in reports/loadtest.html
	@$(BIN)/python -m loadtest.run

snapshot-demo: setup ## a million keys, snapshots while others write, a restore into another cluster
	@$(BIN)/python -m loadtest.snapshot_demo

generate: setup ## write the blocking client again from the asyncio client
	@$(BIN)/python scripts/blocking_client.py

proto: setup ## regenerate the protobuf modules
	@scripts/proto.sh

reference: setup ## write the generated pages of docs/ again from the code
	@PYTHONPATH=. $(BIN)/python scripts/reference.py

lock: ## resolve the dependencies anew
	@scripts/lock.sh

lowest: ## the fast tests with the lowest versions that pyproject.toml allows; asks PyPI
	@scripts/lowest.sh "$(FAST)"

pythons: ## the tests on Python 3.12, 3.13 and 3.14, each in a new Ubuntu or Debian, as root: make pythons VERSIONS=3.14 TARGET=check
	@scripts/pythons.sh $(or $(TARGET),test) $(or $(VERSIONS),3.12 3.13 3.14)

release: setup ## the wheel, the source distribution, their hashes and a bill of materials in dist/; asks PyPI
	@scripts/release.sh

audit: ## known faults of the pinned dependencies; asks PyPI
	@scripts/audit.sh

format: setup ## format, and mend what the linter can mend
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .
