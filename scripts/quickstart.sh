#!/usr/bin/env bash
# From a fresh clone on Debian 12 or Ubuntu 24.04 to a training MiniLLM: installs missing packages (as root), brings LibTorch
# if there is none, builds the two programs into build/bin, and trains a small model on real text, sharded over two processes
# (with GPUs: one process for each). Arguments go to minillm.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

need_packages "${BUILD_PACKAGES[@]}"
cmake -S . -B build $(generator) -DCMAKE_BUILD_TYPE=Release -DFSDPP_UNITY_BUILD=ON -DFSDPP_WITH_CUDA="$(cuda_choice)" \
  -DFSDPP_BUILD_TESTS=OFF -DFSDPP_BUILD_BENCHMARKS=OFF
cmake --build build --parallel "$(nproc)" --target minillm fsdpp-run

device=cpu ranks=2
if grep -q '^fsdpp_built_with_cuda:INTERNAL=ON' build/CMakeCache.txt && command -v nvidia-smi >/dev/null; then
  device=cuda ranks=$(nvidia-smi -L | wc -l)
fi
set -x
build/bin/fsdpp-run --nproc-per-node "$ranks" -- build/bin/minillm --device "$device" \
  --vocab 256 --dim 256 --layers 4 --heads 4 --batch 4 --seq 128 --steps 60 --lr 1e-3 "$@"
