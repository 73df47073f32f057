"""How to run the cluster: as the folder (`python tests/support/slurm_cluster`), or `python -m support.slurm_cluster` from tests/."""

import sys
from pathlib import Path

if not __package__:  # run as a folder, which has only itself on its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from support.slurm_cluster.verbs import main

sys.exit(main())
