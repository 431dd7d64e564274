#!/usr/bin/env bash
# On a machine with a GPU, after scripts/gpu_check.sh has built BUILD: what the profiler claims, against other tools on the same
# kernels. Ends with a short table; the status is non-zero if a row failed. In OUT (default gpu-out/): profiler_table.txt and
# profiler.tar.gz with logs, JSON and the example for docs/profile_example.
# Parts: build tests minillm times ncu bench diff ranks (default: all). Usage: scripts/gpu_profiler_check.sh [PART…]
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-$PWD/gpu-out}
BUILD=${BUILD:-$PWD/build-gpu}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT" "$WORK/logs"
parts=${*:-build tests minillm times ncu bench diff ranks}
table=()
has() { [[ " $parts " == *" $1 "* ]]; }
note() { table+=("$(printf '%-62s %s' "$1" "$2")"); }
check() { # check NAME SECONDS COMMAND…: one row of the table, log in WORK/logs; 77 means that something is not installed
  local name=$1 limit=$2 log start=$SECONDS rc
  log="$WORK/logs/${name//[^A-Za-z0-9_.-]/_}.log"
  shift 2
  timeout -k 5 "$limit" "$@" >"$log" 2>&1
  rc=$?
  case $rc in
    0) note "$name" "ok, $((SECONDS - start)) s" ;;
    77) note "$name" "$(tail -n 1 "$log" | cut -c1-100)" ;;
    *)
      note "$name" "FAILED ($rc), $((SECONDS - start)) s"
      echo "--- $name"
      tail -n 30 "$log" | cut -c1-300
      ;;
  esac
  return $rc
}
show() { tail -n "${2:-12}" "$WORK/logs/${1//[^A-Za-z0-9_.-]/_}.log" | cut -c1-240; }
compare=(python3 scripts/profiler_compare.py)
kernels=$BUILD/bin/profiler_kernels
minillm=("$BUILD/bin/minillm" --device cuda --data synthetic)
export OMP_NUM_THREADS=2

if has build; then
  check build "${BUILD_LIMIT:-400}" cmake --build "$BUILD" --parallel "$(nproc)" --target minillm fsdpp-run fsdpp-prof \
    profiler_gpu_test profiler_kernels bench_profiler || exit 1
fi
if has tests; then
  check "profiler_gpu_test" 150 "$BUILD/bin/profiler_gpu_test"
  show profiler_gpu_test 4
  check "five sessions of 50 kernels, 50 records each" 60 "$BUILD/bin/profiler_gpu_test" --gtest_filter='*FiveSessions*'
fi
if has minillm; then # the seed's shape
  check "minillm --profile --profile-counters" 240 "${minillm[@]}" --steps 16 --profile "$WORK/profile" --profile-counters
  show "minillm --profile --profile-counters" 6
  check "its trace is well formed" 60 "${compare[@]}" trace "$WORK/profile/trace.json.gz"
  check "its one-step trace too" 60 "${compare[@]}" trace "$WORK/profile/step.json.gz"
  check "its audit finds no error" 5 bash -c "grep -q '^  audit:' '$WORK/profile/table.txt' && ! grep ERROR: '$WORK/profile/table.txt'"
  check "its verdicts are measured" 5 grep -q 'speed of light: measured' "$WORK/profile/table.txt"
  check "its trace in HTA" 120 "${compare[@]}" hta "$WORK/profile/trace.json.gz"
  check "its trace in Perfetto's trace processor" 60 "${compare[@]}" perfetto "$WORK/profile/trace.json.gz"
  mkdir -p "$WORK/profile_example"
  cp "$WORK"/profile/{step.json.gz,report.html,report.json,table.txt} "$WORK/profile_example/"
  head -n 45 "$WORK/profile/table.txt" | cut -c1-200
  ls -l "$WORK/profile"
fi
if has times; then # in turns: the GPU's clocks drift
  for turn in 1 2 3; do
    check "kernel times by ours, turn $turn" 60 "$kernels" times "$WORK/ours_$turn.json"
    check "kernel times by torch.profiler, turn $turn" 90 \
      python3 benchmarks/peers/torch_profiler_kernels.py "$WORK/torch_$turn.json"
  done
  check "kernel times equal torch.profiler's to 2 %" 30 "${compare[@]}" times "$WORK"/ours_?.json --with "$WORK"/torch_?.json
  show "kernel times equal torch.profiler's to 2 %"
fi
if has ncu; then
  check "counters of a product and a copy" 120 "$kernels" counters "$WORK/counters.json"
  check "the same by PM sampling" 60 "$kernels" samples "$WORK/samples.json"
  show "the same by PM sampling" 6
  ncu=$(command -v ncu || ls -d /opt/nvidia/nsight-compute/*/ncu 2>/dev/null | tail -n 1)
  if [[ -n $ncu ]]; then
    metrics=sm__throughput.avg.pct_of_peak_sustained_elapsed,gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed
    metrics+=,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,sm__inst_executed.avg.pct_of_peak_sustained_elapsed
    metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum
    check "ncu on the same program" 200 "$ncu" --csv --page raw --print-units base --clock-control none --cache-control none \
      --kernel-name-base demangled --print-kernel-base demangled --kernel-name 'regex:gemm|nvjet|xmma|cutlass|copy' \
      --launch-count 10 --metrics "$metrics" --log-file "$WORK/ncu.csv" "$kernels" run 5
    check "verdicts within 5 points of ncu's" 30 "${compare[@]}" ncu "$WORK/ncu.csv" "$WORK/counters.json"
    show "verdicts within 5 points of ncu's" 16
  else
    note "verdicts within 5 points of ncu's" "skipped: ncu is not installed"
  fi
fi
if has bench; then
  for work in minillm mlp; do
    check "bench_profiler $work" 200 "$BUILD/bin/bench_profiler" cuda $work 8
    show "bench_profiler $work" 1
    check "cost of the base set below 3 %, $work" 10 python3 -c \
      "import json, sys
c = json.loads(open(sys.argv[1]).read().splitlines()[-1])['base_cost']
print(f'{100 * c:.2f} %')
sys.exit(c >= 0.03)" "$WORK/logs/bench_profiler_$work.log"
    show "cost of the base set below 3 %, $work" 1
  done
fi
if has diff; then
  for run in a b; do
    check "minillm --profile, run $run" 120 "${minillm[@]}" --layers 4 --steps 8 --profile "$WORK/diff_$run"
  done
  check "minillm --profile, a larger batch" 120 "${minillm[@]}" --layers 4 --steps 8 --batch 10 --profile "$WORK/diff_c"
  prof_diff() {
    "$BUILD/bin/fsdpp-prof" diff "$WORK/diff_$1/report.json" "$WORK/diff_$2/report.json" --threshold 10 --floor-ms 1
  }
  export -f prof_diff
  export BUILD WORK
  check "fsdpp-prof diff: equal runs" 20 bash -c "prof_diff a b"
  check "fsdpp-prof diff: a batch of 10 for 8 is a regression" 20 bash -c "prof_diff a c; test \$? = 1"
  show "fsdpp-prof diff: a batch of 10 for 8 is a regression" 10
fi
if has ranks; then
  small=(--dim 512 --layers 4 --heads 8 --vocab 4096 --batch 4 --seq 256 --steps 14)
  check "two ranks on one GPU, profiled" 150 "$BUILD/bin/fsdpp-run" --nproc-per-node 2 --ranks-per-gpu 2 -- \
    "${minillm[@]}" "${small[@]}" --profile "$WORK/ranks" --profile-counters
  show "two ranks on one GPU, profiled" 5
  check "merged trace of two ranks" 60 "${compare[@]}" trace "$WORK/ranks/trace.json.gz" --ranks 2
  show "merged trace of two ranks" 2
  check "merged trace in Perfetto's trace processor" 60 "${compare[@]}" perfetto "$WORK/ranks/trace.json.gz"
fi
printf '%s\n' "${table[@]}" >"$WORK/profiler_table.txt"
cp "$WORK/profiler_table.txt" "$OUT/"
# Whole traces are large; the example's one-step trace stays.
find "$WORK" -name trace.json.gz -size +8M -delete
tar -czf "$OUT/profiler.tar.gz" -C "$WORK" .
cat "$OUT/profiler_table.txt"
! grep -q FAILED "$OUT/profiler_table.txt"
