#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --time=00:10:00
#SBATCH --output=lesson-16.log
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 python "$@"
