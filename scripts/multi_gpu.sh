#!/usr/bin/env bash
# On a machine with several GPUs: builds, runs the distributed tests on all of them with NCCL (training parity, HSDP, CPU offload, all
# with sleeps on every stream), kills a rank, then times MiniLLM beside PyTorch FSDP2 at 1, 2, 4, … GPUs in the same call, and the
# collectives beside a bare NCCL loop. Prints the links between the GPUs and a short table last.
# Parts: build tests faults speed profile collectives (default), deep (dim 4096, 32 layers, recomputation; only when named), windows
# (buffers registered with NCCL, gathers by copy engines: tests, a killed rank, collectives, steps, profiles; only when named).
# GPUS=N: how many GPUs (default all). SHARE=1: a dry run, N ranks on one GPU over sockets; its times mean nothing.
# DEVICE=cpu: a dry run without any, GPUS ranks at a tiny shape and no peers.
# Usage: [GPUS=N] [SHARE=1] [DEVICE=cpu] scripts/multi_gpu.sh [PART…]
set -uo pipefail
cd "$(dirname "$0")/.." || exit
parts=${*:-build tests faults speed profile collectives}
source scripts/measure.sh
start_files
n=${GPUS:-$(nvidia-smi -L | wc -l)}
share=${SHARE:-0}
device=${DEVICE:-cuda}
bin=$BUILD/bin

shared_gpu() { ((share)) && echo "--ranks-per-gpu $1"; }
# peer NAME SECONDS RANKS FLAGS…: PyTorch FSDP2.
peer() {
  local name=$1 limit=$2 ranks=$3 shared=()
  shift 3
  [[ $device == cuda ]] || return 0
  ((share)) && shared=(--one-gpu)
  step "$name" "$limit" torchrun --nproc_per_node="$ranks" benchmarks/peers/fsdp2_minillm.py "${shared[@]}" "$@"
}
# launched NAME SECONDS RANKS PROGRAM ARGS…: a step under fsdpp-run.
launched() {
  # shellcheck disable=SC2046 # two words or none
  step "$1" "$2" "$bin/fsdpp-run" --nproc-per-node "$3" $(shared_gpu "$3") -- "${@:4}"
}
# in_bash NAME SECONDS FUNCTION ARGS…: a function of this script as a step.
in_bash() {
  step "$1" "$2" env bin="$bin" share="$share" device="$device" bash -c "$(declare -f shared_gpu "$3"); $(printf '%q ' "${@:3}")"
}

# A rank of a training run is killed: the launcher names it and ends the others within 30 s.
kill_under_launcher() {
  local log victim start status=0 took
  log=$(mktemp)
  # shellcheck disable=SC2046 # two words or none
  "$bin/fsdpp-run" --nproc-per-node "$1" $(shared_gpu "$1") -- "$bin/minillm" --device "$device" --dim 64 --layers 4 \
    --heads 4 --vocab 1024 --batch 1 --seq 32 --steps 1000000 --log-every 20 --data synthetic >"$log" 2>&1 &
  local runner=$!
  for _ in $(seq 600); do grep -q 'Step 40 ' "$log" && break; sleep 0.1; done
  victim=$(pgrep -P "$runner" | sed -n 2p)
  start=$(date +%s%3N)
  kill -KILL "$victim" || { kill "$runner"; tail "$log"; return 1; }
  wait "$runner" || status=$?
  took=$(($(date +%s%3N) - start))
  tail -n 5 "$log"
  echo "{\"bench\": \"killed rank, launcher\", \"ranks\": $1, \"status\": $status, \"reported_ms\": $took}"
  grep -q 'rank 1.* failed first' "$log" && ((status != 0 && took < 30000))
}
# Without a launcher the ranks themselves find out: NCCL says nothing of a dead peer on the same host, the heartbeat does.
# With registered memory a rank may have to end without unwinding: by status 1 in place of 4.
kill_without_launcher() {
  local mode=${2:-die} status
  local folder pids=() start took bad=0 port=$((20000 + RANDOM % 20000))
  local extra=(FSDPP_HEARTBEAT_S=20 MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" WORLD_SIZE="$1" LOCAL_WORLD_SIZE="$1")
  [[ $device == cuda ]] && extra+=(FSDPP_TEST_DEVICE=cuda)
  ((share)) && extra+=(FSDPP_RANKS_PER_GPU="$1" NCCL_SOCKET_IFNAME==lo NCCL_IB_DISABLE=1)
  folder=$(mktemp -d)
  for ((r = 0; r < $1; ++r)); do
    ((share)) && extra+=(NCCL_HOSTID="$port-$r") # a host of its own: NCCL takes no two ranks of one host on one GPU
    env "${extra[@]}" RANK="$r" LOCAL_RANK="$r" "$bin/comm_fault_rank" "$mode" 120000 >"$folder/$r" 2>&1 &
    pids+=($!)
  done
  wait "${pids[1]}" # ends by its own signal
  start=$(date +%s%3N)
  for ((r = 0; r < $1; ++r)); do
    ((r == 1)) && continue
    wait "${pids[r]}" && status=0 || status=$?
    if [[ $status != 4 && ($mode == die || $status != 1) ]] || ! grep -q 'rank 1' "$folder/$r"; then
      bad=1
      echo "rank $r:" && cat "$folder/$r"
    fi
  done
  took=$(($(date +%s%3N) - start))
  cat "$folder/0"
  echo "{\"bench\": \"killed rank, heartbeat of 20 s, $mode\", \"ranks\": $1, \"reported_ms\": $took}"
  rm -rf "$folder"
  [[ $mode == die ]] || took=$((took - 12000)) # NCCL gets that long to end operations that can't be aborted
  ((!bad && took < 30000))
}

sizes=(1)
for ((size = 2; size <= n; size *= 2)); do sizes+=("$size"); done
((sizes[-1] == n)) || sizes+=("$n")

if [[ $device == cuda ]]; then
  nvidia-smi topo -m | tee -a "$OUT/log.txt"
  { git rev-parse HEAD; python3 -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())'
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; } >>"$OUT/log.txt" 2>&1
  shape=(--turns 2) small=(--steps 10) deep=(--dim 4096 --layers 32 --heads 32 --recompute --turns 1 --steps 5) largest=$((1 << 30))
else
  shape=(--shape tiny --turns 1 --steps 2) deep=(--shape tiny --recompute --turns 1) small=(--steps 10 --dim 64 --layers 2 --heads 2 --vocab 256 --batch 1 --seq 16) largest=65536
fi

nccl_test=() # what only a build with CUDA has
[[ $device == cuda ]] && nccl_test=(comm_nccl_graph_test)
has build && build_with_cuda fsdpp-run minillm bench_step bench_collectives comm_conformance_processes_test comm_fault_rank \
  dist_graph_test "${nccl_test[@]}" \
  dist_training_test dist_offload_test dist_fsdp2_parity_test
if has tests; then
  export FSDPP_TEST_WORLD_SIZE=$n FSDPP_TEST_DEVICE=$device
  launched "conformance of the communicators, $n ranks" 90 "$n" "$bin/comm_conformance_processes_test"
  launched "training parity, sleeps on every stream, $n ranks" 120 "$n" "$bin/dist_training_test"
  launched "CPU offload, $n ranks" 90 "$n" "$bin/dist_offload_test"
  launched "FSDP2's parity tests, HSDP among them, $n ranks" 120 "$n" "$bin/dist_fsdp2_parity_test"
  unset FSDPP_TEST_WORLD_SIZE FSDPP_TEST_DEVICE
fi
if has faults && ((n > 1)); then
  in_bash "a killed rank under the launcher" 110 kill_under_launcher "$n"
  in_bash "a killed rank without a launcher" 110 kill_without_launcher "$n"
fi
if has speed; then
  for size in "${sizes[@]}"; do
    launched "fsdpp, $size GPUs, before the peers" 60 "$size" "$bin/bench_step" --device "$device" --variants sharded,sharded-fast --no-products "${shape[@]}"
    peer "FSDP2 eager, $size GPUs" 60 "$size"
    peer "FSDP2 compiled, fused AdamW, $size GPUs" 120 "$size" --compile --fused
    launched "fsdpp, $size GPUs, after the peers" 60 "$size" "$bin/bench_step" --device "$device" --variants sharded,sharded-fast --no-products "${shape[@]}"
  done
fi
if has deep; then
  launched "dim 4096, 32 layers, recomputation, $n GPUs" 240 "$n" "$bin/bench_step" --device "$device" --variants sharded-lean \
    --no-products "${deep[@]}"
fi
if has profile; then
  launched "profile of minillm, $n GPUs" 90 "$n" "$bin/minillm" --device "$device" --data synthetic "${small[@]}" --profile "$LOGS/profile"
  cp "$LOGS"/profile/trace.json.gz "$OUT/" 2>/dev/null
fi
has collectives && launched "collectives beside a bare NCCL loop, $n GPUs" 90 "$n" "$bin/bench_collectives" --device "$device" \
  --max-bytes "$largest"
if has windows; then
  export FSDPP_TEST_WORLD_SIZE=$n FSDPP_TEST_DEVICE=$device
  launched "conformance, buffers among it, $n ranks" 90 "$n" "$bin/comm_conformance_processes_test"
  [[ $device == cuda ]] && launched "registered buffers, captured too, $n ranks" 90 "$n" "$bin/comm_nccl_graph_test"
  for kind in SYMMETRIC_BUFFERS COPY_ENGINE_GATHERS; do
    export "FSDPP_$kind=1"
    launched "training parity, $kind, $n ranks" 120 "$n" "$bin/dist_training_test"
    launched "FSDP2's parity tests, $kind, $n ranks" 120 "$n" "$bin/dist_fsdp2_parity_test"
    [[ $device == cuda && $kind == SYMMETRIC_BUFFERS ]] && launched "steps as graphs, $kind, $n ranks" 120 "$n" "$bin/dist_graph_test"
    unset "FSDPP_$kind"
  done
  unset FSDPP_TEST_WORLD_SIZE FSDPP_TEST_DEVICE
  for mode in die_symmetric die_copy_engine; do
    ((n > 1)) && in_bash "a killed rank, $mode" 110 kill_without_launcher "$n" "$mode"
  done
  for kind in symmetric copy-engine; do
    launched "collectives, $kind, $n GPUs" 90 "$n" "$bin/bench_collectives" --device "$device" --max-bytes "$largest" --buffers "$kind" --limit 20
    launched "collectives, $kind, 8 thread blocks, $n GPUs" 60 "$n" "$bin/bench_collectives" --device "$device" --max-bytes "$largest" \
      --buffers "$kind" --max-ctas 8 --rounds 3 --limit 20
    launched "steps, $kind, $n GPUs" 90 "$n" "$bin/bench_step" --device "$device" --variants "sharded-fast,sharded-$kind" --no-products "${shape[@]}"
  done
  [[ $device == cuda ]] && launched "steps, symmetric in a graph, $n GPUs" 90 "$n" "$bin/bench_step" --device "$device" \
    --variants sharded-graph,sharded-symmetric-graph --no-products "${shape[@]}"
  for kind in plain symmetric-buffers copy-engine-gathers; do
    flag=$([[ $kind == plain ]] || echo "--$kind")
    # shellcheck disable=SC2086 # one word or none
    launched "profile, $kind, $n GPUs" 90 "$n" "$bin/minillm" --device "$device" --data synthetic "${small[@]}" $flag --profile "$LOGS/profile_$kind"
  done
fi
python3 benchmarks/speed_table.py "$OUT/log.txt" | tee "$OUT/table.txt"
python3 benchmarks/exposed_table.py "$LOGS/profile/report.json" | tee -a "$OUT/table.txt"
for kind in plain symmetric-buffers copy-engine-gathers; do
  [[ -f $LOGS/profile_$kind/report.json ]] && echo "$kind:" && python3 benchmarks/exposed_table.py "$LOGS/profile_$kind/report.json"
done | tee -a "$OUT/table.txt"
for name in "collectives beside a bare NCCL loop" "collectives, symmetric" "collectives, symmetric, 8 thread blocks" \
  "collectives, copy-engine" "collectives, copy-engine, 8 thread blocks"; do
  sed 's/^\[[0-9]*\] //' "$(log_of "$name, $n GPUs")" 2>/dev/null | grep -v '^{'
done | tee -a "$OUT/table.txt"
finish
