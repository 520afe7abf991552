# The few commands a person types. Each is one line; the work is in what it calls.
.PHONY: demo test lint bench fmt

demo: ; @demo/demo.sh
test: ; @tests/run.sh
lint: ; @tests/setup/lint.sh
bench: ; @tests/setup/prepare.sh bench && bench/run.py --long
fmt: ; @cargo fmt --all
