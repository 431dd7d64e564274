# Shared by the scripts that measure on machines with GPUs; source it. Steps under time limits, their logs in one file, a short table
# last. OUT (default gpu-out/) gets few files: log.txt, results.jsonl, table.txt. BUILD (default build-gpu/) is reused.

OUT=${OUT:-$PWD/gpu-out}
BUILD=${BUILD:-$PWD/build-gpu}
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT
mkdir -p "$OUT"
table=()
export OMP_NUM_THREADS=2 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

has() { [[ " $parts " == *" $1 "* ]]; }
note() { table+=("$(printf '%-62s %s' "$1" "$2")"); }
log_of() { echo "$LOGS/${1//[^A-Za-z0-9_.-]/_}.log"; }

# step NAME SECONDS COMMAND…: one row of the table; the output goes to the log. Returns the command's status.
step() {
  local name=$1 limit=$2 log start=$SECONDS status=0
  log=$(log_of "$name")
  shift 2
  timeout -k 5 "$limit" "$@" >"$log" 2>&1 || status=$?
  printf '=== %s (status %d, %d s): %s\n' "$name" $status $((SECONDS - start)) "$*" >>"$OUT/log.txt"
  cat "$log" >>"$OUT/log.txt"
  sed 's/^\[[0-9]*\] //' "$log" | grep '^{' >>"$OUT/results.jsonl" # launchers put the rank before a line
  if ((status == 0)); then
    note "$name" "ok, $((SECONDS - start)) s"
  else
    note "$name" "FAILED ($status), $((SECONDS - start)) s"
    echo "--- $name"
    tail -n 25 "$log"
  fi
  return $status
}

# build_with_cuda TARGET…: configures and builds these.
build_with_cuda() {
  { cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFSDPP_WITH_CUDA=ON -DFSDPP_BUILD_TESTS=ON -DFSDPP_UNITY_BUILD=ON &&
    timeout "${BUILD_LIMIT:-300}" cmake --build "$BUILD" --parallel "$(nproc)" --target "$@"; } >"$LOGS/build.log" 2>&1 && {
    note build "ok, $SECONDS s"
    return
  }
  grep -E 'error|Error' -A5 "$LOGS/build.log" | head -60
  cp "$LOGS/build.log" "$OUT/log.txt"
  exit 1
}

# Prints the table and ends with its status.
finish() {
  printf '%s\n' "${table[@]}" | tee -a "$OUT/table.txt"
  ! grep -q 'FAILED' "$OUT/table.txt"
  exit $?
}

start_files() { for file in log.txt results.jsonl table.txt; do : >"$OUT/$file"; done; }
