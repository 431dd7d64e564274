#!/usr/bin/env bash
# On a machine with a GPU: builds with CUDA, runs the GPU tests (one rank, then several NCCL ranks on the one GPU), memcheck on
# a short run, and times minillm beside PyTorch FSDP2 in the same run. Ends with a short table; the status is non-zero if a row
# failed. Full logs in OUT (default gpu-out/).
# Parts: build tests suite sanitizer host speed (default: all). Usage: scripts/gpu_check.sh [PART…]
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-$PWD/gpu-out}
mkdir -p "$OUT"
BUILD=${BUILD:-$PWD/build-gpu}
parts=${*:-build tests suite sanitizer host speed}
table=()
has() { [[ " $parts " == *" $1 "* ]]; }
note() { table+=("$(printf '%-58s %s' "$1" "$2")"); }
check() { # check NAME SECONDS COMMAND…: one row of the table, log under OUT
  local name=$1 limit=$2 log
  log="$OUT/${name//[^A-Za-z0-9_.-]/_}.log"
  shift 2
  local start=$SECONDS
  if timeout -k 5 "$limit" "$@" >"$log" 2>&1; then note "$name" "ok, $((SECONDS - start)) s"; else
    note "$name" "FAILED ($?), $((SECONDS - start)) s"
    echo "--- $name"; tail -n 25 "$log"
  fi
}
run=$BUILD/bin/fsdpp-run
export OMP_NUM_THREADS=2

# What the parts other than the suite run: enough of the tree to be built in a minute or two.
targets=(fsdpp-run minillm bench_host kernels_gpu_test ops_gpu_test comm_conformance_processes_test dist_training_test dist_offload_test
  dist_fsdp2_parity_test dist_graph_test)
has suite && targets=(all)
if has build; then
  { cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFSDPP_UNITY_BUILD=ON -DFSDPP_WITH_CUDA=ON \
      -DFSDPP_BUILD_TESTS=ON &&
    timeout "${BUILD_LIMIT:-300}" cmake --build "$BUILD" --parallel "$(nproc)" --target "${targets[@]}"; } >"$OUT/build.log" 2>&1 || { grep -E 'error|Error' -A5 "$OUT/build.log" | head -60; exit 1; }
  note build ok
fi
if has tests; then
  check kernels_gpu_test 120 "$BUILD/bin/kernels_gpu_test"
  check ops_gpu_test 120 "$BUILD/bin/ops_gpu_test"
  for n in 1 2 4; do
    check "nccl conformance, $n ranks on one GPU" 150 env FSDPP_TEST_WORLD_SIZE=$n FSDPP_TEST_DEVICE=cuda \
      "$run" --nproc-per-node $n --ranks-per-gpu $n -- "$BUILD/bin/comm_conformance_processes_test"
    check "training, $n ranks on one GPU, sleeps on streams" 200 env FSDPP_TEST_WORLD_SIZE=$n FSDPP_TEST_DEVICE=cuda \
      "$run" --nproc-per-node $n --ranks-per-gpu $n -- "$BUILD/bin/dist_training_test"
    check "steps in a CUDA graph, $n ranks on one GPU" 200 env FSDPP_TEST_WORLD_SIZE=$n FSDPP_TEST_DEVICE=cuda \
      "$run" --nproc-per-node $n --ranks-per-gpu $n -- "$BUILD/bin/dist_graph_test"
    check "CPU offload, $n ranks on one GPU" 120 env FSDPP_TEST_WORLD_SIZE=$n FSDPP_TEST_DEVICE=cuda \
      "$run" --nproc-per-node $n --ranks-per-gpu $n -- "$BUILD/bin/dist_offload_test"
  done
  for n in 2 4; do
    check "FSDP2 suite's parity, $n ranks on one GPU" 200 env FSDPP_TEST_WORLD_SIZE=$n FSDPP_TEST_DEVICE=cuda \
      "$run" --nproc-per-node $n --ranks-per-gpu $n -- "$BUILD/bin/dist_fsdp2_parity_test"
  done
fi
small="--dim 256 --layers 4 --heads 4 --vocab 1024 --batch 2 --seq 128 --steps 4"
if has suite; then
  check "whole test suite" 400 ctest --test-dir "$BUILD" -j 8 --no-tests=error --timeout 200 --output-on-failure
  grep -E 'tests passed|Failed|Timeout|Not Run' "$OUT/whole_test_suite.log" | tail -25
fi
if has sanitizer; then
  check "compute-sanitizer memcheck, minillm" 200 compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$BUILD/bin/minillm" --device cuda $small --data synthetic
fi
if has host; then
  check bench_host 100 "$BUILD/bin/bench_host" --device cuda
  cat "$OUT/bench_host.log"
fi
if has speed; then
  # Ours before, between and after the peers: the GPU's clocks drift with its temperature.
  for turn in 1 2 3; do
    check "minillm, seed shape, turn $turn" 120 "$BUILD/bin/minillm" --device cuda --steps 16 --data synthetic --metrics "$OUT/minillm_$turn.jsonl"
    case $turn in
      1) check "peer FSDP2, seed shape" 120 torchrun --nproc_per_node=1 benchmarks/peers/fsdp2_minillm.py --steps 16
         check "peer FSDP2, fused AdamW" 120 torchrun --nproc_per_node=1 benchmarks/peers/fsdp2_minillm.py --steps 16 --fused ;;
      2) check "peer FSDP2, compile, fused AdamW" 200 torchrun --nproc_per_node=1 benchmarks/peers/fsdp2_minillm.py --steps 16 --fused --compile
         check "peer plain PyTorch, fused AdamW" 120 torchrun --nproc_per_node=1 benchmarks/peers/fsdp2_minillm.py --steps 16 --fused --plain ;;
    esac
  done
  "$BUILD/bin/minillm" --device cpu --dry-run --world 1 | tail -n 12 | tee "$OUT/dry_run.txt"
  python3 - "$OUT"/minillm_?.jsonl <<'PYTHON'
import json, statistics, sys
for path in sys.argv[1:]:
    steps = [json.loads(line) for line in open(path)][4:]
    ms = sorted(s["step_ms"] for s in steps)
    print(f"{path.rsplit('/', 1)[-1]}: step ms median {statistics.median(ms):.2f}, {ms[0]:.2f} .. {ms[-1]:.2f}; peak {max(s['peak_bytes'] for s in steps) / 1e9:.2f} GB")
PYTHON
  grep -H step_ms "$OUT"/peer*.log
fi
printf '%s\n' "${table[@]}" | tee "$OUT/table.txt"
! grep -q 'FAILED' "$OUT/table.txt"
