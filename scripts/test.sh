#!/usr/bin/env bash
# Builds everything into build/ and runs all tests. With .venv (or FSDPP_ORACLE_PYTHON: a Python with torch and safetensors)
# the live comparisons with PyTorch FSDP2 are among them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

need_packages "${BUILD_PACKAGES[@]}" libgtest-dev libgmock-dev
flags=(-DCMAKE_BUILD_TYPE=Release -DFSDPP_UNITY_BUILD=ON -DFSDPP_WITH_CUDA="$(cuda_choice)"
  -DFSDPP_BUILD_TESTS=ON -DFSDPP_BUILD_BENCHMARKS=ON)
python=${FSDPP_ORACLE_PYTHON:-}
[[ -n $python || ! -x .venv/bin/python ]] || python=$PWD/.venv/bin/python
[[ -z $python ]] || flags+=(-DFSDPP_ORACLE_PYTHON="$python" -DFSDPP_PYTHON="$python")

cmake -S . -B build $(generator) "${flags[@]}"
cmake --build build --parallel "$(nproc)"
ctest --test-dir build -j2 --no-tests=error --output-on-failure --timeout 300 --output-junit junit.xml
