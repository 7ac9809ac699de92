#!/bin/sh
# deps.sh - installs what is missing for the tasks named: build, model (obtaining one), test, test-c. Prints nothing when all is
# there. On Debian and Ubuntu root gets the packages by apt-get, anybody else the exact line to run; other systems get
# the list of what is needed. With --check nothing is installed.
#
#   CC=gcc ./deps.sh [--check] TASK...

CC=${CC:-cc}
log=build/deps.log
missing=

# library NAME HEADER PACKAGE: PACKAGE is missing unless the compiler finds HEADER. NAME is pkg-config's.
library() {
    printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <%s>\n' "$2" |
        $CC $(pkg-config --cflags "$1" 2>/dev/null) $CPPFLAGS -E - >/dev/null 2>&1 || missing="$missing $3"
}

check=
for task in "$@"; do
    case $task in
    --check) check=yes ;;
    build)
        command -v make >/dev/null || missing="$missing make"
        # Without a compiler no header is found, so that its packages come with all the libraries'.
        echo '#include <stdlib.h>' | $CC -E - >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
        library libpcre2-8 pcre2.h libpcre2-dev
        library jansson jansson.h libjansson-dev
        library libutf8proc utf8proc.h libutf8proc-dev
        library nettle nettle/sha2.h nettle-dev
        library libedit histedit.h libedit-dev
        library sqlite3 sqlite3.h libsqlite3-dev ;;
    model)
        python3 -m pip --version >/dev/null 2>&1 || python3 -c 'import ensurepip' 2>/dev/null ||
            missing="$missing python3-venv" ;;
    test | test-c)
        library cmocka cmocka.h libcmocka-dev
        if [ "$task" = test ]; then    # the CUDA emulator's tests, and those of several processes
            command -v g++ >/dev/null || missing="$missing g++"
            library ompi-c mpi.h libopenmpi-dev
            command -v mpirun >/dev/null || missing="$missing openmpi-bin"
        fi
        [ "$task" = test-c ] || python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv" ;;
    *) echo "deps.sh: unknown task $task" >&2; exit 2 ;;
    esac
done
missing=$(printf '%s\n' $missing | sort -u | tr '\n' ' ' | sed 's/ *$//')
[ -n "$missing" ] || exit 0

install="apt-get install -y $missing"
if ! command -v apt-get >/dev/null; then
    echo "Missing (names of Debian's packages): $missing. Install them with this system's package manager, then run make again." >&2
    exit 1
elif [ -n "$check" ] || [ "$(id -u)" -ne 0 ]; then
    [ "$(id -u)" -eq 0 ] || install="sudo apt-get update && sudo $install"
    echo "Missing: $missing. Run this, then make again:" >&2
    echo "  $install" >&2
    exit 1
fi
echo "Installing with apt-get: $missing" >&2
export DEBIAN_FRONTEND=noninteractive
mkdir -p build
if ! { apt-get -o DPkg::Lock::Timeout=120 update && apt-get -o DPkg::Lock::Timeout=120 install -y $missing; } >"$log" 2>&1
then
    tail -n 5 "$log" >&2
    echo "apt-get failed (all of its output: $log). What is needed: $missing" >&2
    exit 1
fi
