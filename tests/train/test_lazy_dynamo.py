"""Training without torch.compile imports no compiler, and whoever asks for torch's compiler gets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import sys
import paceline, torch
from paceline.recipes import mnist
from paceline.config import config_from_words
words = ["device=cpu", "steps=3", "batch.global_size=32", "checkpoint.every=end"]
mnist.main(config_from_words(mnist.MnistConfig, words))
"""
COUNT = 'print(sum(name.startswith("torch._dynamo.") for name in sys.modules))'
ASK = """
import sys, torch
from paceline.train.lazy_dynamo import LazyDynamo, import_dynamo_lazily
import_dynamo_lazily()
stand_in = torch._dynamo
assert isinstance(stand_in, LazyDynamo)
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight])
optimizer.zero_grad()
ASK
assert not isinstance(sys.modules["torch._dynamo"], LazyDynamo)
assert sys.modules["torch._dynamo"] is torch._dynamo
assert stand_in.config is torch._dynamo.config
other = torch.nn.Parameter(torch.ones(3))
eager = torch.optim.AdamW([other])
optimizer.zero_grad()
weight.grad, other.grad = torch.ones(3), torch.ones(3)
torch.compile(optimizer.step, backend="eager")()
eager.step()
assert torch.equal(weight, other)
"""


def output_of(script: str, folder: Path) -> str:
    """Run a script in a new Python process; return what it printed."""
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    assert output_of(TRAIN + COUNT, tmp_path).splitlines()[-1] == "0"


@pytest.mark.parametrize(
    "ask",
    [
        "import torch._dynamo.config",
        "from torch._dynamo import config",
        "torch._dynamo.reset()",
        "torch.compiler.disable(print)()",
        "torch.compiler.disable(recursive=False)(print)()",
        "torch.compile(torch.nn.Linear(3, 3), backend='eager')(torch.ones(3))",
    ],
)
def test_who_asks_for_the_compiler_gets_torchs_own(ask: str, tmp_path: Path) -> None:
    output_of(ASK.replace("ASK", ask), tmp_path)


def test_questions_that_are_put_to_all_modules_import_nothing(tmp_path: Path) -> None:
    asked = "import inspect; inspect.getmodule(optimizer.step); hasattr(stand_in, '__warningregistry__')"
    script = (
        ASK.partition("ASK")[0] + asked + "\nprint(type(sys.modules['torch._dynamo']).__name__)"
    )
    assert output_of(script, tmp_path).strip() == "LazyDynamo"
