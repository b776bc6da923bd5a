#!/usr/bin/env bash
# Trains on GPU nodes under Slurm, one process for each GPU, and queues itself again when it is stopped early.
#
#   sbatch --nodes=4 experiments/launch/slurm.sh --config_path configs/openwebtext/small.yaml --run_dir /shared/runs
#
# Run it from the repository, on a file system that all nodes see, after `make setup EXTRA=dev,cuda12` on a GPU node.
# The words behind the script go to `qkvflow.train_lm` (PROGRAM=finetune_lm for the other program).
#SBATCH --job-name=qkvflow
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=qkvflow-%j.log
set -uo pipefail

# Compiled programs, shared by all processes and kept for the next start.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/cache/jax}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# srun no longer takes over what sbatch was told.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# Slurm tells this script, not the tasks, that time is almost up (--signal=B:USR1@SECONDS), and the tasks are told to save
# and stop. A job that is still there shortly before the end, because it compiles, say, is queued again all the same:
# Slurm does not queue a job again that it kills at its time limit.
is_told=
# shellcheck disable=SC2317,SC2329 # the trap calls it
stop() {
  is_told=1
  scancel --signal=TERM "$SLURM_JOB_ID"
  local end
  end=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%e) && end=$(date -d "$end" +%s) || return
  { sleep $((end - $(date +%s) - 15)); scontrol requeue "$SLURM_JOB_ID"; } &
}
trap stop USR1

# Passes lines on; a mistake that every process finds is told once.
once() {
  local line mistake=
  while IFS= read -r line; do
    if [[ $line == "error: "* ]]; then
      [[ $line != "$mistake" ]] || continue
      mistake=$line
    fi
    printf '%s\n' "$line"
  done
}

# A node that has died takes the tasks with it long before Slurm misses it, which may give it to the next start of this job
# while it still boots: that start waits for it, or its failure would look like one of the program.
nodes_answer() { timeout 60 srun --overlap --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=0 true; }
for ((tries = 0; tries < 5; tries++)); do
  ! nodes_answer || break
  sleep 5
done

# Levanter and JAX find coordinator, number of processes and GPUs in Slurm's variables.
{
  srun --kill-on-bad-exit=1 .venv/bin/python -m "qkvflow.${PROGRAM:-train_lm}" "$@" 2>&1 >&3 | once >&2
  exit "${PIPESTATUS[0]}"
} 3>&1 &
tasks=$!
interrupted=$((128 + $(kill -l USR1)))
status=$interrupted
while [ "$status" -eq "$interrupted" ]; do # bash calls the trap when it has left `wait`
  wait "$tasks"
  status=$?
done

# If all nodes answer, the fault is another one, and would come again. (srun stops all tasks when one has failed: 143
# alone does not say that time was up.)
if [ "$status" -ne 0 ]; then
  if { [ -n "$is_told" ] && [ "$status" -eq 143 ]; } || ! nodes_answer; then
    scontrol requeue "$SLURM_JOB_ID" # the same command continues from the newest checkpoint
  fi
fi
exit "$status"
