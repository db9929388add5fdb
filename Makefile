.DEFAULT_GOAL := help
.PHONY: setup lock

setup: .venv/.ready

.venv/.ready: requirements-build.lock requirements.lock pyproject.toml scripts/setup.sh
	./scripts/setup.sh

lock:
	./scripts/lock.sh
