#!/bin/sh
# peer.sh DIR - builds llama.cpp's tools into DIR/build/bin from the source package llama-cpp-python of PyPI, for the
# processor at hand. Does nothing when they are there. PYTHON names a Python with pip, JOBS how many compilers run.
set -e
version=0.3.36
tools='llama-bench llama-batched-bench llama-completion llama-perplexity llama-quantize llama-server'
dir=$1
PYTHON=${PYTHON:-python3}

whole=yes
for tool in $tools; do [ -x "$dir/build/bin/$tool" ] || whole=; done
[ -z "$whole" ] || exit 0
for program in cmake c++; do
    command -v $program >/dev/null ||
        { echo "make bench builds llama.cpp and needs $program: apt-get install cmake g++" >&2; exit 1; }
done

mkdir -p "$dir"
package=$dir/llama_cpp_python-$version.tar.gz
if [ ! -f "$package" ]; then
    echo "llama-cpp-python $version: downloading from PyPI" >&2
    "$PYTHON" -m pip download -q --no-deps --no-binary llama-cpp-python --disable-pip-version-check \
        --dest "$dir/part" "llama-cpp-python==$version"
    mv "$dir/part/$(basename "$package")" "$package"
fi
rm -rf "$dir/source"
mkdir "$dir/source"
tar -xzf "$package" -C "$dir/source" --strip-components=3 "llama_cpp_python-$version/vendor/llama.cpp"
echo "llama.cpp: building in $dir/build (log: $dir/build.log)" >&2
{
    cmake -S "$dir/source" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON
    cmake --build "$dir/build" -j "${JOBS:-$(nproc)}" --target $tools
} >"$dir/build.log" 2>&1 || { tail -n 5 "$dir/build.log" >&2; exit 1; }
