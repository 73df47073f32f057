"""Between nodes, a message in the rendezvous store counts only with the signature of the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from paceline import handover
from paceline.errors import EnvironmentUnfit
from paceline.world.detect import detect_world
from paceline.world.mailbox import Mailbox
from paceline.world.rendezvous_file import RendezvousFile
from paceline.world.signed_store import read_secret, signed, signing_key
from paceline.world.world import World

KEY = signing_key("a secret of this job", b"nonce")


def test_ranks_with_one_secret_read_each_other() -> None:
    store = HashStore()
    signed(store, KEY).set("sum-1", "00ff")
    assert signed(store, KEY).get("sum-1") == b"00ff"
    assert signed(store, KEY).multi_get(["sum-1"]) == [b"00ff"]
    assert signed(store, b"") is store


@pytest.mark.parametrize(
    "forge",
    [
        lambda store: store.set("sum-1", "00ff"),
        lambda store: store.set("sum-1", ""),
        lambda store: store.set("sum-1", store.get("sum-0").decode()),  # of another message
        lambda store: signed(store, signing_key("another secret", b"nonce")).set("sum-1", "00ff"),
        lambda store: signed(store, signing_key("a secret of this job", b"old")).set("sum-1", "0"),
    ],
    ids=["unsigned", "empty", "moved", "another secret", "an earlier start"],
)
def test_a_message_of_anybody_else_is_refused(forge) -> None:
    store = HashStore()
    signed(store, KEY).set("sum-0", "00ff")
    forge(store)
    with pytest.raises(EnvironmentUnfit, match="sum-1 .* carries a wrong signature") as caught:
        signed(store, KEY).get("sum-1")
    assert "docs/security.md" in caught.value.fix


def test_sums_of_a_checkpoint_are_signed_between_nodes() -> None:
    mailbox = Mailbox(replace(World(), signing_key=KEY), "save-1")
    mailbox.post("1/0", "{}")
    assert mailbox.look("1/0") == "{}"
    assert mailbox.look("1/1") is None
    mailbox._store._board.set("1/1", '{"name": "forged", "size_bytes": 1, "xxh3": "0"}')
    with pytest.raises(EnvironmentUnfit, match="wrong signature"):
        mailbox.look("1/1")


def test_rank_0_publishes_the_secret_of_a_start_in_a_private_file(tmp_path: Path) -> None:
    file = RendezvousFile(tmp_path / "meetings", "slurm-7-0-0")
    file.prepare()
    assert file.secret() == ""
    file.publish("10.0.0.1", 1234, secret="ab" * 32)
    assert file.read() == ("10.0.0.1", 1234)
    assert file.secret() == "ab" * 32
    assert (file.folder / file.key).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        ("ab" * 32, 0o644, "other users can read"),
        ("short", 0o600, "has 5 characters"),
        (None, 0, "cannot read the job secret"),
    ],
)
def test_a_secret_that_is_none_is_refused(content, mode, problem, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(EnvironmentUnfit, match=problem):
        read_secret(path)


def test_the_secret_file_comes_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    assert detect_world({handover.SECRET_FILE: str(path)}).secret_file == path
    assert read_secret(path) == "ab" * 32
