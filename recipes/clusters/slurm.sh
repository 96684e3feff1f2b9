#!/bin/sh
# MNIST on four nodes of Slurm: sbatch recipes/clusters/slurm.sh [options of train]
#
# The working directory is on a disk that all nodes share, and $DISTBELIEF_DATA names a folder that each of them has.
#SBATCH --job-name=mnist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output=mnist-%j.log
#SBATCH --no-kill
#SBATCH --requeue
set -e
run=runs/mnist-$SLURM_JOB_ID
if ls "$run"/checkpoints/* > /dev/null 2>&1; then
    resume=--resume # after a requeue
else
    rm -rf "$run"
fi
# --no-kill -K0 -W0: the death of a node is not the end of the job
exec srun --no-kill -K0 -W0 --cpus-per-task=1 distbelief train mnist downpour --shards 2 --standby 1 --optimizer adagrad --lr 0.02 \
    --epochs 5 --out "$run" ${resume:-} "$@"
