"""Does a damaged set ever give a wrong sample? Many ways of damage, each read to the end.

    python scripts/fuzz_shards.py --cases 10000 --seed 1

Each case damages one file of a small set (flipped bits, cut short, grown, zeroed, swapped, a header of 2^60 bytes, an index
changed and summed again) and reads all samples. Right are: all samples as they were, if the damage changed nothing that is
read, or an error that names the file. Anything else (a wrong sample, another exception, much memory) is counted as lost.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from paceline.data.shards.index import _checksum  # noqa: E402
from paceline.errors import DataError  # noqa: E402
from support.datasets import make_dataset, open_folder, rows_of, text_of  # noqa: E402 - tests are not a package

_MOST_MEMORY_KB = 200_000
_NUMBERS = (0, 1, -1, 2**31, 2**53, 2**60, 2**63, 2**64, 1.5, "1", None, True, [], {})

Damage = Callable[[Path, random.Random], None]


def main() -> None:
    """Damage, read, count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    known = parser.parse_args()
    chance, outcomes, lost = random.Random(known.seed), Counter[tuple[str, str]](), 0
    with tempfile.TemporaryDirectory() as place:
        good = {kind: make_dataset(Path(place) / kind, 23, 6, rows) for kind, rows in KINDS.items()}
        before = _memory_kb()
        for case in range(known.cases):
            kind, name = chance.choice(list(KINDS)), chance.choice(list(DAMAGES))
            outcome = _one(good[kind], Path(place) / "harmed", DAMAGES[name], chance)
            outcomes[name, outcome] += 1
            if outcome not in {"refused", "unharmed"}:
                lost += 1
                print(f"case {case}: {kind} {name}: {outcome}", file=sys.stderr)
        grown = _memory_kb() - before
    for (name, outcome), count in sorted(outcomes.items()):
        print(f"{name:<12}{outcome:<12}{count:>8,}")
    print(f"{known.cases:,} cases, {lost} lost; memory grew by {grown / 1e3:.0f} MB")
    sys.exit(1 if lost or grown > _MOST_MEMORY_KB else 0)


def _one(good: Path, folder: Path, harm: Damage, chance: random.Random) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    path = folder / "index.json" if harm is _index else chance.choice(sorted(folder.iterdir()))
    harm(path, chance)
    try:
        found = _samples(folder)
    except DataError as error:
        return (
            "refused"
            if path.name in str(error) or harm is _index
            else f"another file named: {error}"
        )
    except Exception as error:  # noqa: BLE001 - what is looked for
        return f"{type(error).__name__}: {error}"
    return "unharmed" if found == _samples(good) else "a wrong sample"


def _samples(folder: Path) -> list[list[object]]:
    source = open_folder(folder)
    return [[column.tolist() for column in source[number]] for number in range(len(source))]


def _flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 1, 2, 16))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def _grow(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 100)))


def _zero(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = chance.randrange(len(content))
    end = min(len(content), begin + chance.randint(1, 500))
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


def _swap(path: Path, chance: random.Random) -> None:
    """Put another file of the set in its place."""
    path.write_bytes(chance.choice(sorted(path.parent.iterdir())).read_bytes())


def _lose(path: Path, chance: random.Random) -> None:
    path.unlink()


def _header(path: Path, chance: random.Random) -> None:
    """Claim a header of another length."""
    length = chance.choice(
        (0, 1, 7, 2**20, 2**31, 2**60, 2**63, 2**64 - 1, chance.randrange(2**64))
    )
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


def _index(path: Path, chance: random.Random) -> None:
    """Change one value of the index, and sum it again: a forged index, not a damaged one."""
    tree = json.loads(path.read_bytes())
    tree.pop("xxh3")
    node, value = tree, chance.choice(_NUMBERS)
    while True:
        key = chance.choice(list(node) if isinstance(node, dict) else list(range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or chance.random() < 0.2:
            break
        node = node[key]
    node[key] = value
    path.write_text(json.dumps(tree | {"xxh3": _checksum(tree)}))


def _memory_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


KINDS = {"rows": rows_of, "text": text_of}
DAMAGES: dict[str, Damage] = {
    "flip": _flip, "cut": _cut, "grow": _grow, "zero": _zero, "swap": _swap, "lose": _lose, "header": _header, "index": _index,
}  # fmt: skip

if __name__ == "__main__":
    main()
