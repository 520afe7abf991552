# The few commands a person types. Each is one command line; the work is in what it calls.
# docs: the documents as a site, in target/site.
.PHONY: demo docs test test-vm test-stores test-external lint bench bench-check soak torture
.PHONY: fuzz mutants fmt

demo: ; @demo/demo.sh
test: ; @tests/run.sh
test-vm: ; @tests/setup/prepare.sh vm && \
	cargo build --release -p sawmill -p sawmill-frontend -p sawmill-driver -p sawmill-c \
		--lib --bins --examples && \
	tests/vm/run.py $(TESTS)
test-stores: ; @tests/setup/prepare.sh stores && cargo build --release -p sawmill && \
	tests/stores/matrix.py
test-external: ; @tests/setup/prepare.sh external && cargo build --release -p sawmill && \
	tests/external/run.py
docs: ; @docs/site/build.sh
lint: ; @tests/setup/lint.sh
bench: ; @tests/setup/prepare.sh bench && bench/run.py --long
bench-check: ; @tests/setup/prepare.sh bench && bench/performance.py --check
soak: ; @cargo run --release -p sawmill-sim --bin sawmill-sim -- --from $(or $(FROM),1) \
	--minutes $(or $(MINUTES),60)
torture: ; @tests/setup/prepare.sh test && cargo build --release -p sawmill && \
	cargo run -p sawmill-tests --bin torture -- $(or $(MINUTES),60)
fuzz: ; @tests/setup/prepare.sh fuzz && crates/fuzz/run.sh $(or $(MINUTES),12) $(TARGETS)
mutants: ; @cargo run --release -p sawmill-sim --bin mutants
fmt: ; @cargo fmt --all
