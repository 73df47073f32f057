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
from moto import settings as moto_settings

from paceline.checkpoint.find import open_storage
from paceline.checkpoint.remote_storage import RemoteStorage
from paceline.checkpoint.retention import Retention
from paceline.config import RunConfig, config_from_words
from paceline.errors import ConfigError, EnvironmentUnfit
from support.checkpoint_contents import (
    bits_of,
    draft,
    failed_save,
    new_saver,
    restore,
    save,
    save_all,
    tensors_of,
)
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


def heavy(*values: object):
    return pytest.param(*values, marks=pytest.mark.heavy)


def keys(client, bucket: str) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def part(client, bucket: str, step: int) -> str:
    saved = [key for key in keys(client, bucket) if f"step-{step:09d}" in key]
    (found,) = [key for key in saved if key.endswith(".safetensors")]
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> str:
    """The digest of a run with checkpoints of its own folder."""
    return train(settings(tmp_path_factory.mktemp("straight")))


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


@pytest.mark.heavy
def test_two_ranks_put_what_they_would_write(bucket, client, env, tmp_path) -> None:
    addresses = [f"s3://{bucket}/runs", str(tmp_path / "local")]
    for number, to in enumerate(addresses):
        words = [*BASE, "steps=6", f"runs={tmp_path}/{number}", f"checkpoint.to={to}"]
        run_on_processes(train_there, 2, tmp_path, {}, {"env": dict(env), "words": words})
    there, here = (restore(open_storage(tmp_path, to, "run")) for to in addresses)
    assert there == here
    assert there[0] == 6
    assert len([key for key in keys(client, bucket) if key.endswith(".safetensors")]) == 2 * 2


def test_a_checkpoint_is_there_once_its_manifest_is_put_last(
    storage, server, client, bucket, monkeypatch
) -> None:
    save(storage, 1, tensors_of(1))
    first, last = server.put()
    assert first.endswith(".safetensors")
    assert last.endswith("/runs/run/step-000000001/manifest.json")

    def ended(*words):
        raise SystemError("the process ended here")

    with monkeypatch.context() as patched:
        patched.setattr(RemoteStorage, "commit", ended)
        assert "SystemError" in failed_save(storage, 2).problem
    assert len([key for key in keys(client, bucket) if "step-000000002" in key]) == 1
    assert storage.steps() == [1]
    before = keys(client, bucket)
    assert save(RemoteStorage(storage.address), 1, tensors_of(2)) == []  # a second save of a step
    assert keys(client, bucket) == before
    assert restore(storage) == (1, bits_of(tensors_of(1)), [])


@pytest.mark.heavy
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


MANIFEST = "runs/run/step-000000002/manifest.json"
DAMAGE = [
    ("", flipped, "other bytes"),
    heavy("", lambda content: content[:-7], "bytes instead of"),
    heavy("", lambda content: content + b"x", "more than"),
    heavy("", lambda content: b"", "0 bytes instead of"),
    heavy("", None, "missing"),
    heavy(MANIFEST, flipped, "manifest"),
]


@pytest.mark.parametrize(("key", "how", "why"), DAMAGE)
def test_a_damaged_object_is_noticed_and_the_older_one_is_taken(
    key, how, why, storage, client, bucket
) -> None:
    for step in (1, 2):
        save(storage, step, tensors_of(step))
    before = len(keys(client, bucket))
    if how is None:
        client.delete_object(Bucket=bucket, Key=part(client, bucket, 2))
    else:
        change(client, bucket, key or part(client, bucket, 2), how)
    step, bits, told = restore(RemoteStorage(storage.address))
    assert (step, bits) == (1, bits_of(tensors_of(1)))
    ((bad, reason),) = told
    assert bad == 2
    assert why in reason
    assert f"{storage.address}/aside-step-000000002" in reason
    assert storage.steps() == [1]
    assert len(keys(client, bucket)) == before - (how is None)


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


def test_what_is_set_aside_stays_and_what_is_old_or_incomplete_goes(storage, client, bucket):
    for seed in (1, 2):
        save(storage, 3, tensors_of(seed))
        storage.set_aside(3)
    assert storage.steps() == []
    aside = set(keys(client, bucket))
    assert len(aside) == 4
    save_all(storage, (3, 4, 5), retention=Retention(2))
    assert storage.steps() == [5, 4]
    for step in (1, 2, 6):
        storage.write(step, "t", "part-00001-of-00001.safetensors", memoryview(b"1234"))
    storage.sweep()
    left = {key.split("/")[2] for key in set(keys(client, bucket)) - aside}
    assert left == {f"step-{step:09d}" for step in (4, 5, 6)}
    assert aside <= set(keys(client, bucket))


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


@pytest.mark.parametrize("trouble", ["no keys", heavy("wrong keys"), heavy("no bucket"), "silence"])
def test_a_store_that_cannot_be_used_is_told_before_the_training(
    trouble, bucket, tmp_path, monkeypatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        if trouble == "silence":
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        if trouble == "no keys":
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        if trouble.endswith("keys"):
            monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
        address = "s3://no-such-bucket/runs" if trouble == "no bucket" else f"s3://{bucket}/runs"
        with pytest.raises(EnvironmentUnfit) as caught:
            train(settings(tmp_path, f"checkpoint.to={address}"))
    assert caught.value.exit_code == 3
    assert address in caught.value.problem
    assert "AWS_" in caught.value.fix or "bucket" in caught.value.fix
    assert events_of(tmp_path, "StepDone") == []
    assert SECRET not in str(caught.value) + (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.heavy
def test_a_store_that_fails_during_the_training_ends_the_run_with_a_word(bucket, server, tmp_path):
    with server.refusing(lambda request: request[0] == "PUT" and "step-000000010" in request[1]):  # noqa: SIM117
        with pytest.raises(EnvironmentUnfit, match=f"cannot write s3://{bucket}/runs/run"):
            train(settings(tmp_path, f"checkpoint.to=s3://{bucket}/runs"))
    assert len(events_of(tmp_path, "CheckpointFailed")) == 1
    found = RemoteStorage(f"s3://{bucket}/runs/run").steps()
    assert 5 in found
    assert 10 not in found


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        ("s3://user:password@bucket/runs", ConfigError, "AWS_SECRET_ACCESS_KEY"),
        ("s3://user@bucket/runs", ConfigError, "AWS_SECRET_ACCESS_KEY"),
        ("s3://key:secret/with/strokes@bucket/runs", ConfigError, "AWS_SECRET_ACCESS_KEY"),
        ("simplecache::s3://user:password@bucket/runs", ConfigError, "AWS_SECRET_ACCESS_KEY"),
        ("nosuch://place/runs", ConfigError, "fsspec"),
        ("gs://place/runs", EnvironmentUnfit, "pip install 'fsspec[gs]'"),
    ],
)
def test_an_address_that_cannot_be_opened_says_what_to_do(address, error, told, tmp_path) -> None:
    with pytest.raises(error) as caught:
        open_storage(tmp_path, settings(tmp_path, f"checkpoint.to={address}").checkpoint.to, "run")
    assert told in str(caught.value) + caught.value.fix
    assert "password@" not in str(caught.value)
    assert "strokes" not in str(caught.value)


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
    save_all(storage, (17, 18), retention=Retention(1))
    assert restore(storage) == (18, bits_of(tensors_of(18)), [])
    assert storage.steps() == [18]
