# The workbook's commands. 'make' alone lists them, from the comments beside the targets.
#   P=PROFILE   a folder of params/ (default: embedded, a real SGLang server on this machine's CPU)
#   NB=03,05    notebooks, for 'make run'
#   PARTS=...   what 'make report' and 'make run' set up: all, or only 'notebooks' where the server is your own

P ?= embedded
PARTS ?= all
# Python 3.11 where there is one (the embedded server needs exactly that); a pyenv shim without a version behind it is not one.
PYTHON ?= $(shell python3.11 -c pass >/dev/null 2>&1 && echo python3.11 || echo python3)
SETUP = @$(PYTHON) lib/deploy/bootstrap.py
BIN = .venv/bin

.DEFAULT_GOAL := help
.PHONY: help report run lab test check setup models lock clean

help: ## this list
	@echo "make TARGET [P=profile] [NB=03,05]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

report: ## set up, run all notebooks on profile P against a real server, say where the HTML report is
	$(SETUP) $(PARTS)
	@$(BIN)/workbook run --profile $(P)

run: ## the same for some notebooks: make run NB=03,05
	@test -n "$(NB)" || { echo "make run needs NB, for example: make run NB=03,05" >&2; exit 2; }
	$(SETUP) $(PARTS)
	@$(BIN)/workbook run --profile $(P) --only $(NB)

lab: ## JupyterLab on the notebooks, reachable from this machine only
	$(SETUP) all
	@$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks \
		--LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate --LabApp.extension_manager=readonly \
		$(if $(filter 0,$(shell id -u)),--allow-root)

test: ## set up, then all tests, also those against real servers, hosts and a browser
	$(SETUP) all
	@$(BIN)/uv pip install -q --python $(BIN)/python -r requirements-dask.txt
	@tests/all.sh $(BIN)/python

check: ## ruff, mypy, generated docs, structure of the notebooks
	$(SETUP) notebooks
	@$(BIN)/ruff check lib tests notebooks benchmarks
	@$(BIN)/mypy
	@$(BIN)/python -m lib.report.docs --check
	@$(BIN)/python -m pytest -q tests/notebooks -m "not server and not lab and not browser and not gpu"

setup: ## only set up: both environments and the models (does nothing where they are there)
	$(SETUP) all

models: ## make the models of the embedded profile that are missing
	$(SETUP) models

lock: ## compile the hashed requirements again, from the .in files
	$(SETUP) notebooks
	@$(BIN)/uv pip compile -q --generate-hashes --no-header --no-annotate --python-version 3.11 \
		requirements.in -o requirements.txt
	@$(BIN)/uv pip compile -q --generate-hashes --no-header --no-annotate --python-version 3.11 --no-deps \
		requirements-server.in -o requirements-server.txt
	@$(BIN)/uv pip compile -q --generate-hashes --no-header --no-annotate --python-version 3.11 \
		requirements-dask.in -o requirements-dask.txt

clean: ## remove both environments and what the set-up keeps (not the models, not outputs/)
	rm -rf .venv .venv-sglang .setup
