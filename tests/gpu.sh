#!/bin/sh
# gpu.sh [--emulated] - the CUDA backend on a machine with a GPU, in under five minutes: builds it, makes random models,
# compares with the CPU backend, runs compute-sanitizer, then times attention, prefill and decode. One table on stdout,
# everything as JSON in build/gpu/result.json; exit 1 on any wrong number. Needs the CUDA toolkit, gcc and Python;
# PyTorch, where it is there, is timed beside.
# --emulated rehearses it without a GPU, with the emulator and small sizes; its times say nothing. --sources names gen's C
# files that it needs, for a test.
set -eu
cd "$(dirname "$0")/.."
B=build/gpu
EMULATED=
[ "${1:-}" = --emulated ] && EMULATED=yes
SOURCES="base gguf quant model kernels kernels_generic cpu threads engine ranks comm memory"
SOURCES="$SOURCES $(echo kvcache*.c | sed 's/\.c//g')"
DEVICE="attention cuda exchange select"
KERNELS="kernels_avx2 kernels_avxvnni kernels_avx512"
if [ "${1:-}" = --sources ]; then
    echo $SOURCES $KERNELS
    exit
fi
mkdir -p $B
CFLAGS="-std=gnu11 -O2 -ffp-contract=off -pthread -Itests/gpu -I."
CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")}

echo "Building into $B" >&2
OBJECTS=
compile() { # NAME FLAGS...
    name=$1; shift
    gcc $CFLAGS "$@" -c $name.c -o $B/"$(basename $name)".o
    OBJECTS="$OBJECTS $B/$(basename $name).o"
}
for s in $SOURCES; do compile $s; done
AVX2="-O3 -mavx2 -mfma -mf16c"
for s in $KERNELS; do
    case $s in
    *avx2) compile $s $AVX2 ;;
    *avxvnni) compile $s $AVX2 -mavxvnni ;;
    *) compile $s $AVX2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512 ;;
    esac
done
gcc $CFLAGS tests/gpu_model.c quant.c -o $B/gpu_model -lm
gcc $CFLAGS -c tests/cuda_tool.c -o $B/cuda_tool.o
PIDS=
if [ -n "$EMULATED" ]; then
    CXXFLAGS='-std=gnu++17 -g -ffp-contract=off -pthread -fno-extern-tls-init -Itests/emulator -I.'
    CHECKED="$(make -s -f - <<'MAKE'
include Makefile
show-checked: ; @echo '$(CHECKED)'
.DEFAULT_GOAL := show-checked
MAKE
)"
    for s in $DEVICE tests/select_tool tests/gpu_time; do
        g++ -x c++ $CXXFLAGS $CHECKED -c $s.cu -o $B/"$(basename $s)".cu.o &
        PIDS="$PIDS $!"
    done
    for s in tests/emulator/*.cpp; do
        g++ $CXXFLAGS -O2 -c $s -o $B/"$(basename $s .cpp)".emulator.o
        OBJECTS="$OBJECTS $B/$(basename $s .cpp).emulator.o"
    done
    for p in $PIDS; do wait "$p"; done
    LIBS='-lstdc++ -lm -pthread'
else
    ARCH=${CUDA_ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)}
    for s in $DEVICE tests/select_tool tests/gpu_time; do
        "$CUDA_HOME"/bin/nvcc -std=c++17 -O3 -fmad=false -Xcompiler -O2,-ffp-contract=off -Itests/gpu -I. \
            -gencode arch=compute_$ARCH,code=sm_$ARCH -c $s.cu -o $B/"$(basename $s)".cu.o &
        PIDS="$PIDS $!"
    done
    for p in $PIDS; do wait "$p"; done
    LIBS="-L$CUDA_HOME/lib64 -Xlinker -rpath -Xlinker $CUDA_HOME/lib64 -lcudart_static -lstdc++ -lm -ldl -lrt -pthread"
fi
for s in $DEVICE; do OBJECTS="$B/$s.cu.o $OBJECTS"; done
gcc -Wl,--wrap=kv_choose -o $B/cuda_tool $B/cuda_tool.o $OBJECTS $LIBS
gcc -o $B/select_tool $B/select_tool.cu.o $OBJECTS $LIBS
gcc -o $B/gpu_time $B/gpu_time.cu.o $OBJECTS $LIBS

EMULATED=$EMULATED B=$B CUDA_HOME=$CUDA_HOME python3 tests/gpu.py
