#!/usr/bin/env bash
# On a machine with one GPU: a training step of MiniLLM by fsdpp, by plain LibTorch and by PyTorch FSDP2 in turns in the same call, at
# the seed's shape and at a launch-bound one, beside the limit of the seed's shape. Prints a short table last, with ratios.
# Parts: build seed launch memory limit (default), fabric (exposed communication on simulated networks of 8, 64 and 1,024 ranks, the last also as 128 replicas).
# VARIANTS: those of bench_step, by commas.
# Usage: [VARIANTS=sharded,plain] scripts/bench_speed.sh [PART…]
set -uo pipefail
cd "$(dirname "$0")/.." || exit
parts=${*:-build seed launch memory limit}
source scripts/measure.sh
start_files

bench_step=$BUILD/bin/bench_step
variants=${VARIANTS:-sharded,sharded-lean,sharded-fast,sharded-graph,sharded-bf16,sharded-bf16-graph,plain,plain-graph}
peer() { # peer NAME SECONDS SCRIPT_FLAGS…
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" torchrun --nproc_per_node=1 benchmarks/peers/fsdp2_minillm.py "$@"
}
# shape NAME PEER_FLAGS…: ours before, between and after the peers, since the GPU's clocks drift with its temperature.
shape() {
  local name=$1 turn products=()
  shift
  for turn in 1 2 3; do
    step "bench_step, $name shape, turn $turn" 120 "$bench_step" --device cuda --shape "$name" --turns 2 --variants "$variants" \
      "${products[@]}"
    products=(--no-products) # once is enough
    case $turn in
      1) peer "FSDP2, $name shape" 60 "$@"
         peer "FSDP2, fused AdamW, $name shape" 60 "$@" --fused ;;
      2) peer "FSDP2, compiled, fused AdamW, $name shape" 150 "$@" --fused --compile ;;
    esac
  done
}

has build && build_with_cuda bench_step bench_memory
has seed && shape seed --steps 20
has launch && shape launch --dim 256 --heads 8 --layers 24 --vocab 1024 --batch 1 --seq 64 --steps 40
has memory && step "peak memory beside the formula" 100 "$BUILD/bin/bench_memory" --device cuda && grep -v '^{' "$(log_of "peak memory beside the formula")"
if has fabric; then
  for ranks in 8 64 1024 "1024 --replicate 128"; do
    read -ra network <<< "$ranks"
    step "seed shape on $ranks simulated ranks" 90 "$bench_step" --device cuda --simulate-ranks "${network[@]}" --turns 2 --steps 4 \
      --no-products --variants sharded,sharded-fast,sharded-graph
    grep -h 'simulated ranks.*:' "$(log_of "seed shape on $ranks simulated ranks")"
  done
fi
has limit && step "limit, seed shape" 60 python3 benchmarks/peers/limit.py
python3 benchmarks/speed_table.py "$OUT/log.txt" | tee "$OUT/table.txt"
finish
