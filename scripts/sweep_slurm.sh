#!/usr/bin/env bash
# A sweep over all GPUs of a SLURM job: one Dask worker a task, one GPU a worker. Submit it again after it was killed.
#
#   sbatch --nodes=4 scripts/sweep_slurm.sh --grid paper --evaluations 24 --db "$HOME/sweep.sqlite"
#
# The folder of --db (or --spool) must be seen by all hosts. SRUN and DEVICE replace srun and cuda:0 (docs/sweeps.md).
#SBATCH --job-name=sweep --ntasks-per-node=8 --gpus-per-task=1 --cpus-per-task=8
set -euo pipefail

folder=$(mktemp -d "${SLURM_SUBMIT_DIR:-$PWD}/.sweep-XXXXXX")
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
file=$folder/scheduler.json

dask scheduler --scheduler-file "$file" --port 0 --no-dashboard >"$folder/scheduler.log" 2>&1 &
# --gpus-per-task shows each task its own GPU alone, which is then its cuda:0.
${SRUN:-srun} dask worker --scheduler-file "$file" --nthreads 1 --resources GPU=1 --memory-limit 0 --no-dashboard \
  --local-directory "${TMPDIR:-/tmp}" --death-timeout 60 >"$folder/workers.log" 2>&1 &

agent sweep --scheduler-file "$file" --device "${DEVICE:-cuda:0}" "$@"
