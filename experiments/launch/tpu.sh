#!/usr/bin/env bash
# Trains on a TPU VM or pod by gcloud: creates it, installs qkvflow on all workers, and trains until the run is finished.
# A preempted TPU is created again, and the run continues from its newest checkpoint.
#
#   TPU=flow ZONE=us-central2-b TYPE=v4-64 BUCKET=my-bucket \
#     experiments/launch/tpu.sh train --config_path configs/openwebtext/small.yaml
#   experiments/launch/tpu.sh create | setup | run ARGS | delete      one stage alone, with the same variables
#
# BUCKET is mounted on every worker by gcsfuse; runs and token caches lie there. SPOT=1 asks for spot capacity.
# REPOSITORY and REVISION say what is installed; by default where this clone comes from, and its commit.
set -euo pipefail

: "${TPU:?name of the TPU}" "${ZONE:?its zone}" "${BUCKET:?Cloud Storage bucket for runs and caches, without gs://}"
TYPE=${TYPE:-v4-8}
VERSION=${VERSION:-tpu-ubuntu2204-base}
PROGRAM=${PROGRAM:-train_lm}
REPOSITORY=${REPOSITORY:-$(git remote get-url origin 2>/dev/null || true)}
REVISION=${REVISION:-$(git rev-parse HEAD)}

on_all() { gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command "$1"; }

state() { gcloud compute tpus tpu-vm describe "$TPU" --zone "$ZONE" --format='value(state)' 2>/dev/null || echo NONE; }

create() {
  local spot=()
  [ -z "${SPOT:-}" ] || spot=(--spot)
  until gcloud compute tpus tpu-vm create "$TPU" --zone "$ZONE" --accelerator-type "$TYPE" --version "$VERSION" \
    ${spot[@]+"${spot[@]}"}; do
    echo "no capacity for $TYPE in $ZONE; trying again in ${RETRY_SECONDS:-60} s" >&2
    sleep "${RETRY_SECONDS:-60}"
  done
}

setup() {
  [ -n "$REPOSITORY" ] || { echo "this clone has no remote: set REPOSITORY to one that the TPU can reach" >&2; exit 1; }
  on_all "set -e
    command -v gcsfuse >/dev/null || { sudo apt-get -qq update; sudo apt-get -qq install -y fuse gcsfuse python3-venv; }
    mkdir -p ~/shared; mountpoint -q ~/shared || gcsfuse --implicit-dirs --rename-dir-limit 100000 $BUCKET ~/shared
    [ -d ~/qkvflow ] || git clone -q $REPOSITORY ~/qkvflow
    cd ~/qkvflow; git fetch -q; git checkout -q $REVISION; make setup EXTRA=dev,tpu"
}

run() {
  local words
  words=$(printf '%q ' "$@")
  # Every worker runs the same command; JAX finds the others by the TPU's metadata.
  on_all "cd ~/qkvflow && JAX_COMPILATION_CACHE_DIR=\$HOME/shared/cache/jax .venv/bin/python -m qkvflow.$PROGRAM $words \
    --run_dir \$HOME/shared/runs --data.cache_dir \$HOME/shared/cache"
}

delete() { gcloud compute tpus tpu-vm delete "$TPU" --zone "$ZONE" --quiet; }

train() {
  while true; do
    case $(state) in
      READY) ;;
      NONE) create ;;
      *) delete || true; create ;;
    esac
    if setup && run "$@"; then
      return
    fi
    if [ "$(state)" = READY ]; then
      echo "the run failed, and not for want of the TPU: see its messages above" >&2
      return 1
    fi
    echo "the TPU is gone ($(state)); creating it again" >&2
  done
}

stage=${1:-train}
[ $# -eq 0 ] || shift
case $stage in
  create | setup | run | delete | train) "$stage" "$@" ;;
  *) echo "unknown stage $stage: create, setup, run, delete or train" >&2; exit 2 ;;
esac
