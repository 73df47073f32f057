"""Checkpoints in an object store: a real S3 API on this machine, and fsspec's own memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from moto import settings as moto_settings

from paceline.checkpoint.find import open_storage
from paceline.checkpoint.remote_storage import RemoteStorage
from paceline.checkpoint.retention import Retention
from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError, EnvironmentUnfit
from support.checkpoint_contents import bits_of, draft, new_saver, restore, save, tensors_of
from support.checkpoint_trainings import (
    BASE,
    OPTIMIZERS,
    Net,
    cut,
    events_of,
    settings,
    train,
    train_elsewhere,
)
from support.processes import CONTEXT, run_on_processes
from support.s3_server import SECRET, bucket, change, client, env, flipped, server, variables  # noqa: F401 - fixtures


@pytest.fixture
def storage(bucket) -> RemoteStorage:
    return RemoteStorage(f"s3://{bucket}/runs/run")


def keys(client, bucket: str) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def part(client, bucket: str, step: int) -> str:
    (found,) = [
        key
        for key in keys(client, bucket)
        if f"step-{step:09d}" in key and key.endswith(".safetensors")
    ]
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> str:
    """The digest of a run with checkpoints of its own folder."""
    return train(settings(tmp_path_factory.mktemp("straight")))


def test_the_server_listens_on_this_machine_only(server) -> None:
    host, port = server._server.socket.getsockname()
    assert host == "127.0.0.1"
    assert server.url.endswith(str(port))


def test_a_run_saves_there_and_goes_on_from_there(bucket, client, tmp_path, straight) -> None:
    config = settings(tmp_path, f"checkpoint.to=s3://{bucket}/runs")
    cut(config, 7)
    assert train(config) == straight
    assert [event["from_step"] for event in events_of(tmp_path, "RunStarted")] == [0, 5]
    assert not (tmp_path / "run" / "checkpoints").exists()
    found = keys(client, bucket)
    assert [key for key in found if key.endswith("manifest.json")] == [
        f"runs/run/step-{step:09d}/manifest.json" for step in (10, 15, 16)
    ]
    assert {key.rpartition(".")[2] for key in found} == {"json", "safetensors"}
    saved = [event["path"] for event in events_of(tmp_path, "CheckpointSaved")]
    assert saved[-1] == f"s3://{bucket}/runs/run/step-000000016"


def train_there(world, env: dict[str, str], words: list[str]) -> None:
    os.environ |= env
    train(config_from_words(RunConfig, words), world=world)


def test_two_ranks_put_what_they_would_write(bucket, client, env, tmp_path) -> None:
    addresses = [f"s3://{bucket}/runs", str(tmp_path / "local")]
    for number, to in enumerate(addresses):
        words = [*BASE, "steps=6", f"runs={tmp_path}/{number}", f"checkpoint.to={to}"]
        run_on_processes(train_there, 2, tmp_path, {}, {"env": dict(env), "words": words})
    there, here = (restore(open_storage(tmp_path, to, "run")) for to in addresses)
    assert there == here
    assert there[0] == 6
    assert len([key for key in keys(client, bucket) if key.endswith(".safetensors")]) == 2 * 2


def test_the_manifest_is_put_last(storage, server) -> None:
    save(storage, 3, tensors_of(1))
    *parts, last = server.put()
    assert len(parts) == 1
    assert parts[0].endswith(".safetensors")
    assert last.endswith("/runs/run/step-000000003/manifest.json")


def test_a_checkpoint_is_not_there_before_its_manifest(
    storage, client, bucket, monkeypatch
) -> None:
    save(storage, 1, tensors_of(1))

    def ended(*words):
        raise SystemError("the process ended here")

    monkeypatch.setattr(RemoteStorage, "commit", ended)
    with pytest.raises(EnvironmentUnfit, match="SystemError"):
        save(storage, 2, tensors_of(2))
    assert len([key for key in keys(client, bucket) if "step-000000002" in key]) == 1
    assert storage.steps() == [1]
    assert restore(storage) == (1, bits_of(tensors_of(1)), [])


def test_an_upload_that_fails_in_the_middle_leaves_nothing_to_be_seen(storage, monkeypatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.remote_storage.CHUNK_BYTES", 5 << 20)
    save(storage, 1, {"w": torch.zeros(100)})
    saver = new_saver(storage)

    def torn(self, file, chunk, sizes=[]):  # noqa: B006
        sizes.append(len(chunk))
        if len(sizes) > 2:
            raise OSError("the line is cut")
        return type(file).write(file, chunk)

    original = storage._fs.open

    @contextlib.contextmanager
    def opened(path, mode, **options):
        with original(path, mode, **options) as file:
            yield type("Torn", (), {"write": lambda own, chunk: torn(own, file, chunk)})()

    monkeypatch.setattr(storage._fs, "open", opened)
    saver.save({"w": torch.zeros(4 << 20)}, draft(2))
    saver.close()
    monkeypatch.undo()
    with pytest.raises(EnvironmentUnfit, match="the line is cut") as caught:
        saver.finished()
    assert storage.address in caught.value.problem
    assert storage.steps() == [1]


def test_a_process_killed_in_the_middle_of_an_upload_leaves_the_older_one(
    bucket, server, env, client, tmp_path
) -> None:
    width = 180_000  # 7 MB, so that there are parts of 5 MB
    words = [
        *(f"{word}" for word in words_of(tmp_path / "killed")),
        f"checkpoint.to=s3://{bucket}/runs",
    ]

    def is_second_part(request: tuple[str, ...]) -> bool:
        return (
            request[0] == "PUT" and "step-000000010" in request[1] and "partNumber=2" in request[2]
        )

    with server.holding(is_second_part):
        process = CONTEXT.Process(
            target=train_elsewhere, args=(dict(env), words, 5 << 20, width), daemon=True
        )
        process.start()
        came = server.came.wait(60)
        process.kill()
        process.join()
        process.close()
        assert came, "no upload in parts"
    storage = RemoteStorage(f"s3://{bucket}/runs/run")
    assert storage.steps() == [5]
    assert [key for key in keys(client, bucket) if "step-000000010" in key] == []
    ways = {"net": lambda: Net(width), "optimizer": OPTIMIZERS["SGD"]}
    resumed = train(config_from_words(RunConfig, words), **ways)
    assert events_of(tmp_path / "killed", "RunStarted")[-1]["from_step"] == 5
    assert resumed == train(config_from_words(RunConfig, words_of(tmp_path / "straight")), **ways)


def words_of(runs: Path) -> list[str]:
    return [
        "batch.global_size=16",
        "batch.lanes=1",
        "steps=11",
        "checkpoint.every=5steps",
        "lr.base=1e-7",
        f"runs={runs}",
    ]


DAMAGE = {
    "a flipped bit": (flipped, "has other bytes than were written"),
    "a torn object": (lambda content: content[:-7], "bytes instead of"),
    "a longer object": (lambda content: content + b"x", "has more than"),
    "an empty object": (lambda content: b"", "has 0 bytes instead of"),
}


@pytest.mark.parametrize(("how", "why"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object_is_noticed_and_the_older_one_is_taken(
    how, why, storage, client, bucket
) -> None:
    for step in (1, 2):
        save(storage, step, tensors_of(step))
    change(client, bucket, part(client, bucket, 2), how)
    step, bits, told = restore(RemoteStorage(storage.address))
    assert (step, bits) == (1, bits_of(tensors_of(1)))
    ((bad, reason),) = told
    assert bad == 2
    assert why in reason
    assert f"it is kept as {storage.address}/aside-step-000000002" in reason
    assert storage.steps() == [1]
    assert len([key for key in keys(client, bucket) if "/aside-step-000000002/" in key]) == 2


def test_a_missing_object_and_a_damaged_manifest_are_noticed(storage, client, bucket) -> None:
    for step in (1, 2, 3):
        save(storage, step, tensors_of(step))
    client.delete_object(Bucket=bucket, Key=part(client, bucket, 3))
    change(client, bucket, "runs/run/step-000000002/manifest.json", flipped)
    step, bits, told = restore(RemoteStorage(storage.address))
    assert (step, bits) == (1, bits_of(tensors_of(1)))
    assert [bad for bad, _ in told] == [3, 2]
    assert "is missing" in told[0][1]
    assert "its manifest has other bytes" in told[1][1]


def test_a_run_passes_over_a_damaged_object(bucket, client, tmp_path, straight) -> None:
    config = settings(tmp_path, f"checkpoint.to=s3://{bucket}/runs")
    cut(config, 12)
    change(client, bucket, part(client, bucket, 10), flipped)
    assert train(config) == straight
    assert [event["step"] for event in events_of(tmp_path, "CheckpointBad")] == [10]


def test_a_store_that_cannot_be_read_for_a_moment_is_not_taken_for_damage(
    storage, server, bucket, client
) -> None:
    for step in (1, 2):
        save(storage, step, tensors_of(step))
    before = keys(client, bucket)
    with (
        server.refusing(
            lambda request: request[0] == "GET" and request[1].endswith(".safetensors")
        ),
        pytest.raises(EnvironmentUnfit, match=f"cannot read {storage.address}"),
    ):
        restore(storage)
    assert keys(client, bucket) == before
    assert restore(storage) == (2, bits_of(tensors_of(2)), [])


def test_a_checkpoint_set_aside_twice_is_kept_twice(storage, client, bucket) -> None:
    for seed in (1, 2):
        save(storage, 3, tensors_of(seed))
        storage.set_aside(3)
    assert storage.steps() == []
    assert (
        len(
            [
                key
                for key in keys(client, bucket)
                if "aside" in key and key.endswith("manifest.json")
            ]
        )
        == 2
    )


def test_what_was_set_aside_outlives_the_step_that_is_saved_again(storage, client, bucket) -> None:
    save(storage, 1, tensors_of(1))
    storage.set_aside(1)
    aside = keys(client, bucket)
    saver = new_saver(storage, retention=Retention(1))
    for step in (1, 2):
        saver.save(tensors_of(step), draft(step))
    saver.close()
    assert [done.manifest.step for done in saver.finished()] == [1, 2]
    assert storage.steps() == [2]
    assert set(aside) <= set(keys(client, bucket))


def test_the_newest_are_kept_and_nothing_of_the_others(storage, client, bucket) -> None:
    saver = new_saver(storage, retention=Retention(2))
    for step in (1, 2, 3, 4):
        saver.save(tensors_of(step), draft(step))
    saver.close()
    assert [done.manifest.step for done in saver.finished()] == [1, 2, 3, 4]
    assert storage.steps() == [4, 3]
    assert {key.split("/")[2] for key in keys(client, bucket)} == {
        "step-000000003",
        "step-000000004",
    }


def test_uploads_that_never_got_a_manifest_are_swept_once_a_newer_one_is_there(
    storage, client, bucket
) -> None:
    for step in (1, 2, 4):
        storage.write(step, "t", "part-00001-of-00001.safetensors", memoryview(b"1234"))
    save(storage, 3, tensors_of(3))
    save(storage, 2, tensors_of(2))
    storage.set_aside(2)
    storage.sweep()
    assert {key.split("/")[2] for key in keys(client, bucket)} == {
        "aside-step-000000002", "step-000000003", "step-000000004",
    }  # fmt: skip
    assert storage.steps() == [3]


def test_a_second_save_of_a_step_leaves_the_first(storage, client, bucket) -> None:
    save(storage, 1, tensors_of(1))
    before = keys(client, bucket)
    assert save(RemoteStorage(storage.address), 1, tensors_of(2)) == []
    assert keys(client, bucket) == before
    assert restore(storage) == (1, bits_of(tensors_of(1)), [])


def test_of_two_writers_at_once_one_wins(storage, monkeypatch) -> None:
    both = threading.Barrier(2)
    exists = type(storage._fs).exists

    def asked(fs, path, **options):
        found = exists(fs, path, **options)
        both.wait(30)  # both have seen that there is none
        return found

    monkeypatch.setattr(type(storage._fs), "exists", asked)
    savers = [new_saver(storage), new_saver(RemoteStorage(storage.address))]
    for seed, saver in enumerate(savers):
        saver.save(tensors_of(seed), draft(1))
    for saver in savers:
        saver.close()
    won = [seed for seed, saver in enumerate(savers) if saver.finished()]
    assert len(won) == 1
    assert restore(storage) == (1, bits_of(tensors_of(won[0])), [])


def test_a_run_does_not_see_another_whose_name_begins_alike(storage, bucket) -> None:
    save(RemoteStorage(f"s3://{bucket}/runs/run2"), 9, tensors_of(1))
    save(storage, 1, tensors_of(1))
    assert storage.steps() == [1]
    assert RemoteStorage(f"s3://{bucket}/runs").steps() == []


def check_words(error: EnvironmentUnfit, address: str) -> None:
    assert error.exit_code == 3
    assert address in error.problem
    assert "AWS_" in error.fix or "bucket" in error.fix
    assert SECRET not in str(error)


def test_a_bucket_that_is_not_there_is_noticed_before_the_training(env, tmp_path) -> None:
    with pytest.raises(EnvironmentUnfit) as caught:
        train(settings(tmp_path, "checkpoint.to=s3://no-such-bucket/runs"))
    check_words(caught.value, "s3://no-such-bucket/runs")
    assert events_of(tmp_path, "StepDone") == []


@pytest.mark.parametrize("known", ["wrong keys", "no keys"])
def test_wrong_credentials_are_an_unfit_environment(known, bucket, tmp_path, monkeypatch) -> None:
    if known == "no keys":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
    with pytest.raises(EnvironmentUnfit) as caught:
        train(settings(tmp_path, f"checkpoint.to=s3://{bucket}/runs"))
    check_words(caught.value, f"s3://{bucket}/runs/run")
    assert SECRET not in (tmp_path / "run" / "events.jsonl").read_text()


def test_an_endpoint_that_nobody_answers_is_an_unfit_environment(
    env, tmp_path, monkeypatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(EnvironmentUnfit) as caught:
            train(settings(tmp_path, "checkpoint.to=s3://bucket/runs"))
    check_words(caught.value, "s3://bucket/runs/run")


def test_a_store_that_fails_during_the_training_ends_the_run_with_a_word(
    bucket, server, tmp_path
) -> None:
    with server.refusing(lambda request: request[0] == "PUT" and "step-000000010" in request[1]):  # noqa: SIM117
        with pytest.raises(EnvironmentUnfit, match=f"cannot write s3://{bucket}/runs/run"):
            train(settings(tmp_path, f"checkpoint.to=s3://{bucket}/runs"))
    assert len(events_of(tmp_path, "CheckpointFailed")) == 1
    found = RemoteStorage(f"s3://{bucket}/runs/run").steps()
    assert 5 in found
    assert 10 not in found


@pytest.mark.parametrize(
    "address",
    [
        "s3://user:password@bucket/runs",
        "s3://user@bucket/runs",
        "ftp://user:password@host/runs",
        "s3://key:secret/with/strokes@bucket/runs",
        "git+ssh://user:password@host/runs",
        "simplecache::s3://user:password@bucket/runs",
    ],
)
def test_a_password_in_the_address_is_refused_and_not_repeated(address) -> None:
    with pytest.raises(ConfigError, match="contains a user name or password") as caught:
        config_from_words(RunConfig, [f"checkpoint.to={address}"])
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.fix
    assert "password@" not in str(caught.value)
    assert "strokes" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        ("nosuch://place/runs", ConfigError, "another address that fsspec supports"),
        ("gs://place/runs", EnvironmentUnfit, r"pip install 'fsspec\[gs\]'"),
    ],
)
def test_an_address_that_cannot_be_opened_says_what_to_do(address, error, told, tmp_path) -> None:
    with pytest.raises(error, match=told):
        open_storage(tmp_path, address, "run")


def test_a_path_is_a_folder_of_the_runs_name(tmp_path, straight) -> None:
    config = settings(tmp_path / "runs", f"checkpoint.to={tmp_path / 'elsewhere'}")
    assert train(config) == straight
    assert (tmp_path / "elsewhere" / "run" / "step-000000016" / "manifest.json").is_file()


@pytest.fixture
def memory(tmp_path) -> Iterator[str]:
    address = f"memory://{tmp_path.name}"
    yield address
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_a_run_saves_to_memory_and_goes_on_from_it(memory, tmp_path, straight) -> None:
    config = settings(tmp_path, f"checkpoint.to={memory}")
    cut(config, 12)
    storage = open_storage(tmp_path, memory, "run")
    assert storage.steps() == [10, 5]
    (name,) = storage.manifest(10).files
    path = f"/{tmp_path.name}/run/step-000000010/{name}"
    fsspec.filesystem("memory").pipe_file(path, flipped(fsspec.filesystem("memory").cat_file(path)))
    assert train(config) == straight
    assert [event["step"] for event in events_of(tmp_path, "CheckpointBad")] == [10]
    assert storage.steps() == [16, 15, 10]


def test_memory_keeps_the_newest_and_the_bits(memory, tmp_path) -> None:
    storage = open_storage(tmp_path, memory, "run")
    assert storage.steps() == []
    saver = new_saver(storage, retention=Retention(1))
    for step in (1, 2):
        saver.save(tensors_of(step), draft(step))
    saver.close()
    assert [done.manifest.step for done in saver.finished()] == [1, 2]
    assert restore(storage) == (2, bits_of(tensors_of(2)), [])
    assert storage.steps() == [2]
