"""The training of the tests, slow as long as there is no checkpoint, in haste when it goes on from one."""

import json
import os
from pathlib import Path

import paceline

if __name__ == "__main__":
    place = json.loads(os.environ["PACELINE_SET"])
    if any(Path(place["runs"], place["name"], "checkpoints").glob("step-*")):
        os.environ["SLOW_STEP"] = "0"

    import training

    training.main(paceline.config_from_argv())
