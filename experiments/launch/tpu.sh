#!/usr/bin/env bash
# Trains on a TPU VM or pod by gcloud: creates it, installs qkvflow on all workers, and trains until the run is finished.
# A preempted TPU is created again, and the run continues from its newest checkpoint.
#
#   TPU=flow ZONE=us-central2-b TYPE=v4-64 BUCKET=my-bucket \
#     experiments/launch/tpu.sh train --config_path configs/openwebtext/small.yaml
#   experiments/launch/tpu.sh create | setup | run ARGS | delete      one stage alone, with the same variables
#
# BUCKET is mounted on every worker by gcsfuse; runs and token caches lie there. SPOT=1 asks for spot capacity, QUEUED=1
# for a queued resource (v5p and v6e are always asked for in this way; QUEUED=0 asks at once).
# REPOSITORY and REVISION say what is installed; by default where this clone comes from, and its commit.
# WANDB_API_KEY and HF_TOKEN go to the workers if they are set here.
set -euo pipefail

: "${TPU:?name of the TPU}" "${ZONE:?its zone}" "${BUCKET:?Cloud Storage bucket for runs and caches, without gs://}"
TYPE=${TYPE:-v4-8}
case $TYPE in
  v5litepod-*) image=v2-alpha-tpuv5-lite queued=0 ;;
  v5p-*) image=v2-alpha-tpuv5 queued=1 ;;
  v6e-*) image=v2-alpha-tpuv6e queued=1 ;;
  *) image=tpu-ubuntu2204-base queued=0 ;;
esac
VERSION=${VERSION:-$image}
QUEUED=${QUEUED:-$queued}
PROGRAM=${PROGRAM:-train_lm}
REPOSITORY=${REPOSITORY:-$(git remote get-url origin 2>/dev/null || true)}
REVISION=${REVISION:-$(git rev-parse HEAD)}
RETRY_SECONDS=${RETRY_SECONDS:-60}
here=$(dirname "${BASH_SOURCE[0]}")

tpus() { gcloud compute tpus "$1" "$2" "$TPU" --zone "$ZONE" "${@:3}"; }

on_all() { tpus tpu-vm ssh --worker=all --command "$1"; }

later() {
  echo "$1; looking again in $RETRY_SECONDS s" >&2
  sleep "$RETRY_SECONDS"
}

# What gcloud says of a state; NONE if there is no such thing. Any other error ends the script.
ask() {
  local errors found
  errors=$(mktemp)
  if found=$(tpus "$1" describe --format="value($2)" 2>"$errors"); then
    echo "$found"
  elif grep -qi "not.found" "$errors"; then
    echo NONE
  else
    cat "$errors" >&2
    rm "$errors"
    return 1
  fi
  rm "$errors"
}

# NONE, READY, PREEMPTED, or what Google calls it.
state() {
  local found
  if [ "$QUEUED" = 1 ]; then
    found=$(ask queued-resources state.state) || return
    case $found in
      ACTIVE) ;;
      SUSPENDING | SUSPENDED) echo PREEMPTED && return ;;
      *) echo "$found" && return ;;
    esac
  fi
  found=$(ask tpu-vm state) || return
  # TERMINATED, in Google's words: "due to preemption or maintenance". What is STOPPED, or on its way, comes again.
  case $found in TERMINATED) echo PREEMPTED ;; *) echo "$found" ;; esac
}

create() {
  local spot=() said
  [ -z "${SPOT:-}" ] || spot=(--spot)
  if [ "$QUEUED" = 1 ]; then
    tpus queued-resources create --node-id "$TPU" --accelerator-type "$TYPE" --runtime-version "$VERSION" \
      ${spot[@]+"${spot[@]}"}
    return
  fi
  until said=$(tpus tpu-vm create --accelerator-type "$TYPE" --version "$VERSION" ${spot[@]+"${spot[@]}"} 2>&1); do
    echo "$said" >&2
    if grep -qi quota <<<"$said" || ! grep -qiE "no more capacity|RESOURCE_EXHAUSTED" <<<"$said"; then
      echo "the TPU cannot be created, and waiting would not help: see above" >&2
      return 1
    fi
    later "no capacity for $TYPE in $ZONE"
  done
}

setup() {
  [ -n "$REPOSITORY" ] || { echo "this clone has no remote: set REPOSITORY to one that the TPU can reach" >&2; exit 1; }
  on_all "$(printf '%s=%q\n' BUCKET "$BUCKET" REPOSITORY "$REPOSITORY" REVISION "$REVISION"; cat "$here/tpu_worker.sh")"
}

# By a file: a command line is shown to everyone on the machine.
send_keys() {
  local file name
  file=$(mktemp)
  for name in WANDB_API_KEY HF_TOKEN; do
    [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}" >>"$file"
  done
  gcloud compute tpus tpu-vm scp "$file" "$TPU:.qkvflow_keys" --zone "$ZONE" --worker=all
  rm "$file"
}

run() {
  local words
  words=$(printf '%q ' "$@")
  send_keys
  # Every worker runs the same command; JAX finds the others by the TPU's metadata.
  on_all "chmod 600 ~/.qkvflow_keys && . ~/.qkvflow_keys && cd ~/qkvflow &&
    JAX_COMPILATION_CACHE_DIR=\$HOME/shared/cache/jax .venv/bin/python -m qkvflow.$PROGRAM $words \
    --run_dir \$HOME/shared/runs --data.cache_dir \$HOME/shared/cache"
}

delete() {
  if [ "$QUEUED" = 1 ]; then
    tpus queued-resources delete --force --quiet # the TPU with it
  else
    tpus tpu-vm delete --quiet
  fi
}

train() {
  local now
  while true; do
    now=$(state)
    case $now in
      NONE) create ;;
      PREEMPTED)
        echo "the TPU is preempted; creating it again" >&2
        delete
        ;;
      READY)
        if setup && run "$@"; then
          return
        fi
        later "the run has ended early" # a preemption takes a moment to show
        now=$(state)
        if [ "$now" = READY ]; then
          echo "the run failed, and not for want of the TPU: see its messages above" >&2
          return 1
        fi
        ;;
      STOPPED | FAILED)
        echo "the TPU is $now: start it, or delete it by '$0 delete'" >&2
        return 1
        ;;
      *) later "the TPU is $now" ;;
    esac
  done
}

stage=${1:-train}
[ $# -eq 0 ] || shift
case $stage in
  create | setup | run | delete | train) "$stage" "$@" ;;
  *) echo "unknown stage $stage: create, setup, run, delete or train" >&2; exit 2 ;;
esac
