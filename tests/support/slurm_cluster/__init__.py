"""A real Slurm cluster of N emulated nodes on one Linux host.

Every node, and the head, where slurmctld runs, is a set of Linux namespaces: its own host name, address, process
ids, /proc, /run, /dev/shm and mounts. Slurm is Debian's, unpacked into a private folder and laid over /usr inside
those namespaces only. Nothing is installed, no service is started, nothing appears in the host's network; all state
lives in one folder, and the end of `hold` ends every process. Needs root, util-linux, iproute2 and overlayfs; apt-get once.

  python tests/support/slurm_cluster --dir FOLDER hold [--nodes 2] [--cpus 4] [--gpus 2] [--set KillWait=5] ...
                                          start; when the standard input ends, stop and remove the folder
  ... run -- sbatch job.sh                run a command on the head
  ... run --node n2 -- ip addr            run a command on a node
  ... power-off n2 | power-on n2          pull the plug of a node, boot it
  ... slurmd n2 kill|start                only the daemon; jobs are left alone
  ... link n2 down|up|rate 1gbit|clear

Several clusters can run at once, each in its own folder.

There are two ways of tracking the processes of a job, as on real clusters, and they differ in who gets a signal: with
--cgroup only the task that srun started (limits of memory and devices are real, too); without it every process of the
step. Test with both.
"""
