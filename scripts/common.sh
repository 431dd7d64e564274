# Shared by the scripts beside it; source it.

# Installs the given Debian packages that are missing, as root; otherwise says which and stops.
need_packages() {
  command -v dpkg-query >/dev/null || return 0 # another system: CMake says what it misses
  local missing=() package
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    echo "Missing packages. Try: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "Installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

BUILD_PACKAGES=(g++ cmake ninja-build ca-certificates python3 python3-pip libfmt-dev libspdlog-dev libcli11-dev nlohmann-json3-dev
  zlib1g-dev)

# OFF on a machine without a GPU driver, so that the small CPU download does; FSDPP_WITH_CUDA overrides.
cuda_choice() {
  if [[ -n ${FSDPP_WITH_CUDA:-} ]]; then
    echo "$FSDPP_WITH_CUDA"
  elif [[ -e /dev/nvidiactl ]]; then
    echo AUTO
  else
    echo OFF
  fi
}

# Ninja for a new build folder; an old one keeps its generator.
generator() { [[ -e build/CMakeCache.txt ]] || ! command -v ninja >/dev/null || echo -GNinja; }
