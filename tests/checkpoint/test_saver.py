"""A save is whole or it is not there; it never changes what was there before."""

import errno
import os
import pickletools
import threading
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import commit as commit_module
from paceline.checkpoint.local_storage import LocalStorage
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.storage import verify
from paceline.errors import BadCheckpoint, EnvironmentUnfit, PacelineError
from support.checkpoint_contents import (
    bits_of,
    draft,
    failed_save,
    files_of,
    flip,
    local,
    new_saver,
    part_of,
    restore,
    save,
    save_all,
    tensors_of,
)  # fmt: skip
from support.processes import run_on_processes


class FullStorage(LocalStorage):
    """A disk without space."""

    def write(self, step, token, name, image):
        raise OSError(errno.ENOSPC, "No space left on device")


class SlowStorage(LocalStorage):
    """A disk that writes when it is told to."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.go = threading.Event()
        self.writing = 0
        self.most = 0

    def write(self, step, token, name, image):
        self.writing += 1
        self.most = max(self.most, self.writing)
        assert self.go.wait(30)
        done = super().write(step, token, name, image)
        self.writing -= 1
        return done


class DamagingStorage(LocalStorage):
    """A disk that spoils one checkpoint as soon as it exists."""

    def __init__(self, root, spoiled: int) -> None:
        super().__init__(root)
        self._spoiled = spoiled

    def commit(self, step, token, manifest):
        done = super().commit(step, token, manifest)
        if step == self._spoiled:
            flip(part_of(self.root, step))
        return done


class DyingStorage(LocalStorage):
    """A process that ends after its file is written and before the checkpoint exists."""

    def commit(self, step, token, manifest):
        raise SystemError("the process ended here")


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    return tensors_of(seed) if seed else {"w": torch.arange(5.0)}  # fewer tensors than ranks


def save_there(world, root: str, seed: int, step: int = 1) -> list[int]:
    saver = new_saver_of_all(local(Path(root)), world)
    saver.save(some_tensors(seed), draft(step))
    saver.close()
    return [done.manifest.step for done in saver.finished()]


def new_saver_of_all(storage, world, **options):
    from paceline.checkpoint.save import Saver
    from paceline.world.collectives import all_gather_texts

    return Saver(storage, world, all_gather_texts(world, os.urandom(4).hex())[0], **options)


def read_there(world, root: str):
    return restore(local(Path(root)), world)


def test_what_is_read_has_the_bits_of_what_was_saved(tmp_path) -> None:
    (done,) = save(
        local(tmp_path), 7, tensors_of(1), metrics={"acc": 0.5}, values={"any": [1, "x"]}
    )
    assert restore(local(tmp_path)) == (7, bits_of(tensors_of(1)), [])
    assert done.where == str(tmp_path / "step-000000007")
    assert done.manifest == local(tmp_path).manifest(7)
    assert done.manifest.values == {"any": [1, "x"]}
    assert 0 < done.held_s <= done.total_s


@pytest.mark.parametrize(
    ("writers", "readers", "seed", "parts"), [(1, 3, 3, 1), (3, 2, 3, 3), (3, 1, 0, 1)]
)
def test_it_has_the_same_bits_at_another_world_size(writers, readers, seed, parts, tmp_path):
    root = tmp_path / "checkpoints"
    said = run_on_processes(save_there, writers, tmp_path, {}, {"root": str(root), "seed": seed})
    assert said == [[1]] + [[]] * (writers - 1)
    assert len(list(root.glob("step-000000001/part-*-of-*.safetensors"))) == parts
    found = run_on_processes(read_there, readers, tmp_path, {}, {"root": str(root)})
    assert found == [(1, bits_of(some_tensors(seed)), [])] * readers


def test_tensors_may_change_as_soon_as_save_returns(tmp_path) -> None:
    storage, tensors = SlowStorage(tmp_path), tensors_of(5)
    expected = bits_of(tensors)
    saver = new_saver(storage)
    saver.save(tensors, draft(1))
    assert saver.busy
    for value in tensors.values():
        value.zero_()
    storage.go.set()
    saver.close()
    assert restore(storage) == (1, expected, [])


def test_tensors_that_are_views_are_saved_as_they_look(tmp_path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {"turned": base.T, "some": base[::2, ::3], "repeated": base[:1].expand(5, 6)}
    views |= {"tied": base}
    save(local(tmp_path), 1, views)
    assert restore(local(tmp_path))[1] == bits_of(views)


def test_at_most_one_save_is_under_way(tmp_path) -> None:
    storage = SlowStorage(tmp_path)
    saver = new_saver(storage)
    saver.save(tensors_of(1), draft(1))
    assert saver.busy
    assert saver.finished() == []
    threading.Timer(0.2, storage.go.set).start()
    saver.save(tensors_of(2), draft(2))  # waits for the first
    done = saver.finished()
    assert done[0].manifest.step == 1
    saver.close()
    assert not saver.busy
    assert [each.manifest.step for each in (*done, *saver.finished())] == [1, 2]
    assert storage.most == 1


def test_a_second_save_of_a_step_is_waited_for_too(tmp_path) -> None:
    storage = SlowStorage(tmp_path)
    storage.go.set()
    saver = new_saver(storage)
    saver.save(tensors_of(1), draft(4))
    saver.close()
    storage.go.clear()
    saver.save(tensors_of(2), draft(4))
    threading.Timer(0.2, storage.go.set).start()
    saver.wait()
    try:
        assert storage.writing == 0
    finally:
        saver.close()


def test_a_second_save_of_a_step_leaves_the_first_byte_by_byte(tmp_path) -> None:
    saver = new_saver(local(tmp_path))
    saver.save(tensors_of(1), draft(4))
    saver.close()
    before = files_of(tmp_path)
    for again in (saver, new_saver(local(tmp_path))):
        again.save(tensors_of(2), draft(4))
        again.close()
    assert files_of(tmp_path) == before
    assert restore(local(tmp_path)) == (4, bits_of(tensors_of(1)), [])


def test_a_second_save_of_a_step_by_other_processes_leaves_the_first(tmp_path) -> None:
    root = tmp_path / "checkpoints"
    save(local(root), 1, tensors_of(1))
    before = files_of(root)
    given = {"root": str(root), "seed": 2}
    assert run_on_processes(save_there, 2, tmp_path, {}, given) == [[], []]
    assert files_of(root) == before


def test_a_step_whose_manifest_is_gone_is_told_of_and_can_be_saved_again(tmp_path) -> None:
    for step in (1, 2, 3):
        save(local(tmp_path), step, tensors_of(step))
    (tmp_path / "step-000000003").rename(tmp_path / "step-000000009")  # another step's name
    (tmp_path / "step-000000002" / "manifest.json").unlink()
    step, bits, told = restore(local(tmp_path))
    assert (step, bits) == (1, bits_of(tensors_of(1)))
    assert [bad for bad, _ in told] == [9, 2]
    assert [done.manifest.step for done in save(local(tmp_path), 2, tensors_of(2))] == [2]
    assert restore(local(tmp_path)) == (2, bits_of(tensors_of(2)), [])


def test_a_type_that_no_file_can_hold_is_an_error_with_a_way_out(tmp_path) -> None:
    with pytest.raises(PacelineError, match="complex128"):
        new_saver(local(tmp_path)).save({"w": torch.zeros(2, dtype=torch.complex128)}, draft(1))


def test_all_bytes_are_flushed_to_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    happened: list[str] = []
    rename = Path.rename

    def named(path, target):
        happened.append("named")
        return rename(path, target)

    def flushed(file):
        happened.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", named)
    save(local(tmp_path), 1, tensors_of(1))
    part, manifest, folder, name, above = happened
    assert part == "part-00001-of-00001.safetensors"
    assert manifest.startswith(".manifest.json.")
    assert folder.startswith(".step-000000001.")
    assert name == "named"
    assert above == tmp_path.name


def test_a_failed_save_is_an_error_that_finished_raises_and_does_not_stop_the_next(tmp_path):
    storage = local(tmp_path)
    saver = new_saver(storage)
    storage.write = FullStorage(tmp_path).write
    saver.save(tensors_of(1), draft(3))
    saver.close()
    with pytest.raises(EnvironmentUnfit, match="step 3.*No space left on device") as caught:
        saver.finished()
    assert caught.value.fix
    assert storage.steps() == []
    del storage.write
    saver.save(tensors_of(2), draft(4))
    saver.close()
    assert [done.manifest.step for done in saver.finished()] == [4]


def test_a_file_in_the_way_is_an_error_that_names_the_folder(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "file/checkpoints" in failed_save(local(tmp_path / "file" / "checkpoints")).problem


def save_with_one_full_disk(world, root: str, full: int) -> str:
    """Return what this rank hears of a save for which one rank has no space."""
    storage = (FullStorage if world.rank == full else LocalStorage)(Path(root))
    saver = new_saver_of_all(storage, world, silence_s=60.0)
    saver.save(tensors_of(1), draft(1))
    try:
        saver.close()
        saver.finished()
    except EnvironmentUnfit as error:
        return error.problem
    return ""


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_that_cannot_write_is_heard_of_by_all(full, tmp_path) -> None:
    root = tmp_path / "checkpoints"
    said = run_on_processes(
        save_with_one_full_disk, 2, tmp_path, {}, {"root": str(root), "full": full}
    )
    assert all("No space left on device" in problem for problem in said), said
    assert local(root).steps() == []


def give_up(world, root: str) -> str:
    """Rank 1 never saves."""
    if not world.is_main:
        return ""
    commit_module._GRACE_S = 0.2
    saver = new_saver(local(Path(root)), world)
    saver.save(tensors_of(1), draft(1))
    saver.give_up()
    saver.close()
    with pytest.raises(EnvironmentUnfit, match="another rank did not write its part in time"):
        saver.finished()
    return " ".join(map(str, local(Path(root)).steps()))


def test_a_save_that_lacks_a_rank_never_exists(tmp_path) -> None:
    said = run_on_processes(give_up, 2, tmp_path, {}, {"root": str(tmp_path / "checkpoints")})
    assert said == ["", ""]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (1, "", [5]),
        (3, "", [3, 4, 5]),
        (9, "", [1, 2, 3, 4, 5]),
        (1, "max:acc", [2, 5]),
        (2, "min:acc", [1, 4, 5]),
        (2, "max:unheard_of", [4, 5]),
    ],
)
def test_the_newest_are_kept_and_the_best(keep, best, left, tmp_path) -> None:
    saver = new_saver(local(tmp_path), retention=Retention(keep, best))
    for step, metrics in enumerate(
        [{"acc": 0.1}, {"acc": 0.9}, {}, {"acc": 0.9}, {"acc": float("nan")}], start=1
    ):
        saver.save({"w": torch.full((3,), float(step))}, draft(step, metrics=metrics))
    saver.close()
    assert [done.manifest.step for done in saver.finished()] == [1, 2, 3, 4, 5]
    assert sorted(local(tmp_path).steps()) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:09d}" for step in left]


def test_nothing_is_deleted_for_a_newest_that_does_not_verify(tmp_path) -> None:
    saver = new_saver(DamagingStorage(tmp_path, spoiled=3), retention=Retention(1))
    for step in (1, 2):
        saver.save(tensors_of(step), draft(step))
        saver.close()
    assert [done.manifest.step for done in saver.finished()] == [1, 2]
    before = files_of(tmp_path / "step-000000002")
    saver.save(tensors_of(3), draft(3))
    saver.close()
    assert [done.manifest.step for done in saver.finished()] == [3]
    with pytest.raises(EnvironmentUnfit, match="step-000000003 is damaged"):
        saver.finished()
    assert files_of(tmp_path / "step-000000002") == before
    step, bits, told = restore(local(tmp_path))
    assert (step, bits) == (2, bits_of(tensors_of(2)))
    assert [bad for bad, _ in told] == [3]


def test_a_checkpoint_that_cannot_be_judged_is_not_deleted(tmp_path) -> None:
    save(local(tmp_path), 1, tensors_of(1))
    flip(tmp_path / "step-000000001" / "manifest.json", 20)
    save_all(local(tmp_path), (2, 3), retention=Retention(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", "step-000000003"]


def test_leftovers_of_interrupted_saves_are_never_taken_and_are_swept(tmp_path) -> None:
    save(local(tmp_path), 1, tensors_of(1))
    assert "SystemError" in failed_save(DyingStorage(tmp_path), 2).problem
    (tmp_path / ".deleted-step-000000001").mkdir()
    (tmp_path / ".deleted-step-000000001" / "part").write_text("left")
    assert len(list(tmp_path.iterdir())) == 3
    assert local(tmp_path).steps() == [1]
    not_ours = ["notes.txt", "aside-step-000000009", "step-x", ".git"]
    for name in not_ours:
        (tmp_path / name).mkdir()
    # This deletes step 1, whose deletion was interrupted before.
    save_all(local(tmp_path), (2,), retention=Retention(1))
    local(tmp_path).sweep()
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000002", *not_ours}
    assert restore(local(tmp_path)) == (2, bits_of(tensors_of(2)), [])


def test_a_checkpoint_set_aside_twice_is_kept_twice(tmp_path) -> None:
    storage = local(tmp_path)
    for seed in (1, 2):
        save(storage, 3, tensors_of(seed))
        storage.set_aside(3)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"aside-step-000000003", "aside-step-000000003-1"}
    assert storage.steps() == []


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda part: flip(part, 100), "has other bytes than were written"),
        (lambda part: part.unlink(), "is missing"),
        (lambda part: part.write_bytes(part.read_bytes()[:-7]), "bytes instead of"),
        (lambda part: part.write_bytes(part.read_bytes() + b"x"), "has more than"),
        (lambda part: part.write_bytes(b""), "has 0 bytes instead of"),
        (lambda part: (part.unlink(), part.mkdir()), "cannot be read"),
        (lambda part: flip(part.with_name("manifest.json"), 50), "its manifest has other bytes"),
    ],
)
def test_damage_is_told_of_and_the_older_one_is_taken(damage, why, tmp_path) -> None:
    for step in (1, 2):
        save(local(tmp_path), step, tensors_of(step))
    damage(part_of(tmp_path, 2))
    with pytest.raises(BadCheckpoint, match=why):
        verify(local(tmp_path), 2)
    step, bits, told = restore(local(tmp_path))
    assert (step, bits) == (1, bits_of(tensors_of(1)))
    ((bad, reason),) = told
    assert bad == 2
    assert why in reason
    assert f"it is kept as {tmp_path}/aside-step-000000002" in reason


def damage_and_read(world, root: str):
    return restore(local(Path(root)), world)


def test_damage_that_one_rank_finds_is_known_to_all(tmp_path) -> None:
    root = tmp_path / "checkpoints"
    save(local(root), 1, tensors_of(1))
    run_on_processes(save_there, 3, tmp_path, {}, {"root": str(root), "seed": 2, "step": 2})
    flip(max((root / "step-000000002").glob("*.safetensors")))  # which rank 0 of two does not read
    first, second = run_on_processes(damage_and_read, 2, tmp_path, {}, {"root": str(root)})
    assert first[:2] == second[:2] == (1, bits_of(tensors_of(1)))
    assert [bad for bad, _ in first[2]] == [2]
    assert second[2] == []  # only rank 0 tells


def test_files_are_private_and_of_two_kinds_only(tmp_path) -> None:
    before = os.umask(0)
    try:
        save(local(tmp_path / "a" / "b"), 1, tensors_of(1))
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
        assert path.is_dir() or path.name == "manifest.json" or path.suffix == ".safetensors"


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path) -> None:
    save(local(tmp_path), 1, tensors_of(1), values={"numbers": {"a": "int"}})
    for name, content in files_of(tmp_path).items():
        assert content[:1] != b"\x80", name
        assert not content.startswith(b"PK"), name
        with pytest.raises(Exception, match=".*"):
            list(pickletools.genops(content))


def test_memory_that_is_still_being_written_is_never_filled_again(tmp_path) -> None:
    storage = SlowStorage(tmp_path)
    saver = new_saver(storage, silence_s=0.2)
    saver.save(tensors_of(1), draft(1))
    with pytest.raises(EnvironmentUnfit, match="step 2.*still being written"):
        saver.save(tensors_of(2), draft(2))
    storage.go.set()
    saver.close()
    with pytest.raises(EnvironmentUnfit, match="step 1.*in time"):
        saver.finished()


def test_a_part_that_rank_0_does_not_see_is_not_committed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.commit._VISIBLE_S", 0.1)
    monkeypatch.setattr(LocalStorage, "written_size", lambda *words: -1)
    assert "part-00001" in failed_save(local(tmp_path)).problem
    assert local(tmp_path).steps() == []
