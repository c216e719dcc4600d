#!/bin/bash
# sbatch THIS_FILE     in a checkout of Podium on a file system that all nodes share. A job that is requeued, because a
#                      node failed, it was preempted, or its time was over, continues from its last checkpoint.
# scancel JOB          ends it, and leaves it the cluster's KillWait to save;
# scancel --signal=USR1 --batch JOB     has it save, with no limit, and be requeued: as before its time is over.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time={time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{notice_s}
#SBATCH --output={name}-%j.log
{gpus}
set -u
ulimit -c 0
attempt=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
export PODRUN_JOBS=$SLURM_SUBMIT_DIR/podium-jobs/$attempt
mkdir -p "$PODRUN_JOBS"
cat > "$PODRUN_JOBS/config.yaml" <<'END_OF_CONFIG'
{config}
END_OF_CONFIG
export PODRUN_PYTHON={python}
export PODRUN_WORKERS=$SLURM_NNODES PODRUN_NONCE=$attempt REQUIRE_JAX_PROCESS_COUNT={nodes}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PODRUN_COORDINATOR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'):{port}
export PODRUN_COORDINATOR
stopping=
trap '[ -n "$stopping" ] || scancel --signal=TERM "$SLURM_JOB_ID.0"; stopping=1' USR1
srun --cpu-bind=none --kill-on-bad-exit=0 --label bash -c '
    export PODRUN_WORKER=$SLURM_PROCID PODRUN_JOB_DIR=$PODRUN_JOBS/$SLURM_PROCID
    mkdir -p "$PODRUN_JOB_DIR"
    exec "$PODRUN_PYTHON" -m podium.cli train "$PODRUN_JOBS/config.yaml" --plain' &
step=$!
# Slurm gives {notice_s} s of notice, this more if the last save took long; a job that is still there at the end is
# requeued, because Slurm requeues none whose time is over.
end=$(date -d "$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*EndTime=\([^ ]*\).*/\1/p')" +%s)
notice=$("$PODRUN_PYTHON" -m podium.job.save_notice {run})
half=$(((end - $(date +%s)) / 2))
until_left() {{ local wait_s=$((end - $(date +%s) - $1)); sleep $((wait_s > 0 ? wait_s : 0)) & wait $!; }}
(
    trap 'kill $! 2>/dev/null; exit' TERM
    until_left $((notice < half ? notice : half))
    kill -USR1 $$
    until_left 20
    scontrol requeue "$SLURM_JOB_ID"
) &
timer=$!
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do   # the signal ended the wait, not the step
    wait "$step"
    status=$?
done
kill "$timer" 2>/dev/null
"$PODRUN_PYTHON" -m podium.job.report "$PODRUN_JOBS"
if [ -n "$stopping" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
