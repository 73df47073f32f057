"""The training of the tests: slow until there is a checkpoint, fast when it resumes from one."""

import json
import os
import signal
import time
from pathlib import Path

if __name__ == "__main__":
    if "DEAF" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    if "HESITANT" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        print("not met yet", flush=True)
        time.sleep(1000)

    import paceline

    place = json.loads(os.environ["PACELINE_SET"])
    checkpoints = Path(place["runs"], place["name"], "checkpoints").glob("step-*")
    if any(checkpoints):
        os.environ["SLOW_STEP"] = "0"

    import training

    training.main(paceline.config_from_argv())
