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
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=qkvflow-%j.log
set -uo pipefail

# Compiled programs, shared by all processes and kept for the next start.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/cache/jax}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Levanter and JAX find coordinator, number of processes and GPUs in Slurm's variables.
srun --kill-on-bad-exit=1 .venv/bin/python -m "qkvflow.${PROGRAM:-train_lm}" "$@"
status=$?

# 143: stopped by SIGTERM (end of time, preemption) with a checkpoint. The same command continues there.
if [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
