# Everything a fresh machine with Python 3.11+, git and make needs: make demo, make test.
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 2
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

.PHONY: help setup demo test chaos bench lint fmt lock clean
.DEFAULT_GOAL := help

help: ## say what can be made
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F'\t' '{ printf "make %-7s %s\n", $$1, $$2 }'

setup: $(READY) ## make .venv with the locked dependencies (demo and test do this by themselves)

$(READY): scripts/setup pyproject.toml requirements/dev.txt requirements/uv.txt
	@sh scripts/setup
	@touch $@

demo: setup ## run the whole product on its embedded default; CHECK=1 plays the story alone and counts
	@$(BIN)/redrive demo $(if $(CHECK),--check)

test: lint ## check and test everything
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

chaos: setup ## kill processes at every fault point, then in storms; SEEDS=n or SECONDS=s say how many
	@$(BIN)/python -m chaos --jobs $(WORKERS) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SECONDS),--seconds $(SECONDS))

bench: setup ## measure against peers in one run; ONLY=name picks a family or one row
	@$(BIN)/python -m bench $(ONLY)

lint: setup ## style, layers and types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "These files are not formatted; run: make fmt" >&2; $(BIN)/ruff format --check >&2; }
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

fmt: setup ## put the code in its usual form
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format

lock: setup ## write requirements/*.txt anew; UPGRADE=1 takes the newest versions
	@$(COMPILE) requirements/uv.in -o requirements/uv.txt
	@$(COMPILE) pyproject.toml --group dev --all-extras -o requirements/dev.txt

clean: ## remove everything that was made here
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m lab down; fi
	rm -rf .venv .lab .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
