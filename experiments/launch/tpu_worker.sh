#!/usr/bin/env bash
# Installs qkvflow on a worker of a TPU and mounts its bucket; tpu.sh sends this to all of them, with the three variables.
# What is there already is left as it is.
set -euo pipefail
: "${BUCKET:?}" "${REPOSITORY:?}" "${REVISION:?}"

packages() { sudo DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "$@"; } # new machines update first

has_python() {
  local python
  for python in python3.12 python3.11; do
    if "$python" -c 'import venv, ensurepip' 2>/dev/null; then return; fi
  done
  return 1
}

# Google's images have Ubuntu 22.04, whose Python is 3.10.
if ! has_python; then
  packages update
  apt-cache show python3.12 >/dev/null 2>&1 || sudo add-apt-repository -y ppa:deadsnakes/ppa
  packages install -y python3.12 python3.12-venv
fi

if ! command -v make >/dev/null || ! command -v git >/dev/null; then
  packages update
  packages install -y make git
fi

if ! command -v gcsfuse >/dev/null; then
  curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /usr/share/keyrings/cloud.google.asc >/dev/null
  echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  packages update
  packages install -y fuse gcsfuse
fi

mkdir -p ~/shared
mountpoint -q ~/shared || gcsfuse --implicit-dirs --rename-dir-limit 100000 "$BUCKET" ~/shared
[ -d ~/qkvflow ] || git clone -q "$REPOSITORY" ~/qkvflow
cd ~/qkvflow
git fetch -q
git checkout -q "$REVISION"
make setup EXTRA=dev,tpu
