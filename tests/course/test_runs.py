"""Does every lesson run as it says, and show what it promises? Each is run once; neighbours are compared.

`make test` runs one lesson (test_lessons.py) and the solutions of two exercises; `make test-all` runs all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from paceline.course.catalog import all_lessons
from support.private_cluster import cluster_or_skip, wanted
from support.program import started

NUMBERS = [lesson.number for lesson in all_lessons()]
ON_SLURM = 16
OUTPUT = Path(__file__).resolve().parents[2] / "lessons" / "output"
VARYING = {5, 15, ON_SLURM, 20, 21, 33, 34}
"""Lessons whose output has another form each time or elsewhere: a profile, failures, a text by a GPT, names of a machine; or that need Slurm."""
COLD = (15,)
"""The lesson whose processes begin anew, and end as they do for a reader: torchrun, ranks, a kill, a restart."""
LOSS = re.compile(
    r"(?:rank (\d)(?: on node \d)?, )?epoch (\d): [\w\s,.]*?loss (?:of all ranks )?(\d+\.\d{4})"
)
_PATIENCE_S = 280

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


@functools.cache
def said(number: int) -> str:
    """Return what `paceline lesson N` prints after it has explained the lesson."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = stack.enter_context(
            started("lesson", str(number), folder=folder, cold=number in COLD)
        )
        done = running.wait(_PATIENCE_S)
        assert done.code == 0, done.out + done.err
        assert running.left_over() == []
    return done.out.partition("\n\n$ ")[2] + done.err


def commands(number: int) -> list[str]:
    """Return the outputs of a lesson's commands, one after the other."""
    return re.split(r"^\$ .*\n", said(number), flags=re.MULTILINE)


def losses(text: str) -> dict[tuple[str, str], str]:
    """Return what each rank said its loss was in each epoch."""
    return {(rank or "0", epoch): loss for rank, epoch, loss in LOSS.findall(text)}


def accuracies(text: str) -> set[str]:
    return set(re.findall(r"accuracy (\d\.\d{3})", text))


def shapes(text: str) -> set[str]:
    """Return the lines of an output without numbers and places."""
    return {
        re.sub(r"[^\s(]*/\S+|\b[\da-f]{16}\b|[\d.,:e+-]+", "#", line).strip()
        for line in text.splitlines()
    }


@pytest.mark.parametrize("number", [number for number in NUMBERS if number != ON_SLURM])
def test_a_lesson_runs_and_its_output_is_of_the_form_on_the_page(number: int) -> None:
    now = said(number)
    assert now
    if number not in VARYING:
        kept = (OUTPUT / f"{number:02d}.txt").read_text(encoding="utf-8")
        known = shapes(re.sub(r"^\$ .*$", "", kept, flags=re.MULTILINE)) - {""}
        again = f"run: python scripts/docs/lesson_output.py {number}"
        assert len(known - shapes(now)) <= len(known) / 4, f"{again}; now it prints:\n{now}"


@pytest.mark.parametrize("number", [0, 1, 9])
def test_four_ranks_add_up_their_numbers(number: int) -> None:
    assert sorted(re.findall(r"had (\d), and the sum is 6(?!\d)", said(number))) == list("0123")


def test_nodes_have_two_ranks_each() -> None:
    assert sorted(re.findall(r"of node (\d)", said(9))) == list("0011")


def test_four_times_the_same_work_gives_four_times_the_same_losses() -> None:
    assert len(set(losses(said(3)).values())) == 3
    assert len(losses(said(3))) == 12
    assert {loss for (_, epoch), loss in losses(said(3)).items() if epoch == "3"} == {
        losses(said(2))["0", "3"]
    }


def test_averaged_gradients_keep_all_models_the_same() -> None:
    four, alone = commands(4)
    assert len(set(losses(four).values())) == 12
    assert len(accuracies(four)) == 1
    ends = [float(loss) for (_, epoch), loss in losses(four).items() if epoch == "3"]
    assert sum(ends) / 4 == pytest.approx(float(losses(alone)["0", "3"]), rel=0.01)


def test_ddp_does_what_was_done_by_hand() -> None:
    by_hand, wrapped = (losses(commands(number)[0]) for number in (4, 6))
    assert {key: float(loss) for key, loss in wrapped.items()} == pytest.approx(
        {key: float(loss) for key, loss in by_hand.items()}, abs=0.002
    )


def test_nodes_do_not_change_the_training() -> None:
    assert losses(said(10)) == losses(commands(6)[0])


def test_the_profiler_shows_the_averaging() -> None:
    table = said(5).partition("Name ")[2].splitlines()
    assert "average_gradients" in "".join(table[:10])


def test_a_speed_up_is_printed_for_each_size() -> None:
    assert re.findall(r"ranks (\d): .*speed-up", said(7)) == ["1", "2"]


def test_the_curve_of_one_device_is_matched_by_keeping_the_batch() -> None:
    one, behind, closer, kept = (float(losses(text)["0", "3"]) for text in commands(8))
    assert kept == pytest.approx(one, rel=0.005)
    assert one < closer < behind


def test_chunks_teach_as_well() -> None:
    assert float(accuracies(said(11)).pop()) > 0.85


def test_processes_of_one_program_and_of_torchrun_train_alike() -> None:
    assert losses(said(13)) == losses(commands(14)[0])
    assert said(13).count("saved lesson-13.pt") == 3


def test_a_killed_run_ends_like_one_that_nobody_disturbed() -> None:
    ends = {key: loss for key, loss in losses(said(15)).items() if key[1] == "6"}
    assert ends == {key: loss for key, loss in losses(commands(14)[0]).items() if key[1] == "6"}
    before, after = said(15).split("--- rank 1 is killed here ---")
    assert "epoch 3: loss" in before
    assert sorted(re.findall(r"rank \d begins with epoch \d", said(15))) == [
        f"rank {rank} begins with epoch {epoch}" for rank in "01" for epoch in "13"
    ]
    assert losses(after).keys() == {(rank, epoch) for rank in "01" for epoch in "3456"}
    assert "Traceback" not in said(15), "noise is left out"


@pytest.mark.heavy  # the same jobs as in tests/slurm, with the lesson's scripts
@pytest.mark.slurm
def test_slurm_runs_it_interactively_and_as_a_job(tmp_path: Path) -> None:
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with cluster_or_skip(wanted(nodes=2, cpus=2)) as slurm:
        done = slurm.run(
            ["paceline", "lesson", str(ON_SLURM)], folder=tmp_path, env=path, timeout_s=_PATIENCE_S
        )
    assert done.code == 0, done.out + done.err
    log = (tmp_path / "lesson-16.log").read_text()
    assert len([key for key in losses(done.out) if key[1] == "6"]) == 4
    assert {epoch for _, epoch in losses(log)} == {"7", "8"}, (
        "the job goes on from the epochs of the first command"
    )


def test_parts_of_a_batch_give_the_curve_of_the_whole() -> None:
    too_large, parts = commands(18)[0], commands(18)[-1]
    assert "MemoryError: out of memory" in said(18)
    assert "it failed, as expected" in too_large
    ends = [float(losses(text)["0", "3"]) for text in (parts, said(2))]
    assert ends[0] == pytest.approx(ends[1], rel=0.1)


def test_precisions_stay_close() -> None:
    ends = [float(losses(text)["0", "3"]) for text in commands(19)]
    assert ends == pytest.approx([ends[0]] * 3, rel=0.15)


def test_stacks_show_who_waits_where() -> None:
    assert "it failed, as expected" in commands(20)[0]
    assert re.search(r"in backward\n.*20_hang", said(20))
    assert re.search(r"in barrier\n(.*\n)?.*20_hang", said(20))
    assert len(accuracies(commands(20)[1])) == 1
    assert not re.search(r"ChildFailedError|site-packages", said(20)), "noise is left out"


def test_paceline_says_in_one_sentence_who_waits_for_whom() -> None:
    verdict = re.search(r"^watchdog: .*rank 1 .*$", commands(20)[-1], re.MULTILINE)
    assert verdict, commands(20)[-1]
    assert "it failed, as expected" in commands(20)[-1]


def test_a_gpt_learns() -> None:
    found = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said(21))]
    assert found[-1] < 3 < found[0]


def test_slices_hold_half_and_learn_the_same() -> None:
    whole, half = (
        int(word.replace(",", "")) for word in re.findall(r"holds ([\d,]+) bytes", said(22))
    )
    assert half == pytest.approx(whole / 2, rel=0.02)
    before, after = (re.findall(r"step \d+: loss ([\d.]+)", text) for text in commands(22))
    assert list(map(float, after)) == pytest.approx(list(map(float, before)), abs=0.02)
    assert before == re.findall(r"step \d+: loss ([\d.]+)", said(21))


def test_all_worlds_have_the_same_bits() -> None:
    plain = re.findall(r"plain DDP, world size \d: acc (\d\.\d+), weights (\w{16})", said(23))
    assert len({digest for _, digest in plain}) == 2, "plain DDP depends on the world size"
    found = [*(acc for acc, _ in plain), *re.findall(r"epoch 3/3 .* acc (\d\.\d+)", said(23))]
    assert len(found) == 5
    assert min(map(float, found)) > 0.9
    digests = re.findall(r"optimizer state (\w{16})", said(23))
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert "the same bits" in said(23)


def test_halves_of_an_mlp_learn_as_the_whole() -> None:
    halves, whole = commands(24)
    ends = {loss for (_, epoch), loss in losses(halves).items() if epoch == "3"}
    assert len(ends) == 1, "all ranks see the same output"
    assert float(ends.pop()) == pytest.approx(float(losses(whole)["0", "3"]), rel=0.01)
    held = [int(word.replace(",", "")) for word in re.findall(r"of \d: ([\d,]+) param", said(24))]
    assert held[0] == held[1] == pytest.approx(held[2] / 2, rel=0.01)


def test_a_pipeline_gives_the_same_loss_for_any_number_of_micro_batches() -> None:
    line = r"micro-batches (\d): loss ([\d.]+), \d+ ms, bubble \d+%, formula (\d+)%"
    counts, ends, formulas = zip(*re.findall(line, said(25)), strict=True)
    assert counts == ("1", "2", "4", "8")
    assert len(set(ends)) == 1
    assert formulas == ("75", "60", "43", "27")


def test_zero_holds_16_10_7_and_4_bytes_per_parameter() -> None:
    line = r"stage \d: .* in all ([\d,]+) bytes per rank; loss ([\d.]+)"
    held, ends = zip(*re.findall(line, said(26)), strict=True)
    whole, *sharded = (int(word.replace(",", "")) for word in held)
    assert [16 * one / whole for one in sharded] == pytest.approx([10, 7, 4])
    assert list(map(float, ends)) == pytest.approx([float(ends[0])] * 4, abs=0.01)


def test_segments_keep_less_and_run_twice() -> None:
    line = r"(\d+) segments: loss ([\d.]+), kept at most ([\d,]+) bytes, (\d+) layers run"
    counts, ends, kept, runs = zip(*re.findall(line, said(27)), strict=True)
    most = dict(zip(counts, (int(word.replace(",", "")) for word in kept), strict=True))
    assert min(most, key=most.__getitem__) in {"4", "8"}
    assert most["8"] < most["0"] / 2
    assert (set(ends), runs[0], set(runs[1:])) == ({ends[0]}, "16", {"32"})


def test_a_ring_of_ranks_computes_what_one_process_does_with_a_quarter_of_the_bytes() -> None:
    line = r"rank (\d) of 4: 128 positions, (\d) blocks, kept ([\d,]+) of ([\d,]+) bytes, scores differ by (\S+), gr"
    ranks = sorted(re.findall(line, said(30)))
    assert [(rank, blocks) for rank, blocks, *_ in ranks] == [("0", "1"), ("1", "2"), ("2", "3"), ("3", "4")]  # fmt: skip
    kept, whole = ({int(one[n].replace(",", "")) for one in ranks} for n in (2, 3))
    assert kept.pop() == pytest.approx(whole.pop() / 4, rel=0.05)
    assert 0 < max(float(error) for *_, error in ranks) < 1e-5


def test_a_graph_trains_as_eager_does_and_cannot_hold_what_the_host_must_know() -> None:
    ends = re.findall(r"(?:eager|captured|compiled): loss ([\d.]+), [1-9]\d* operators", said(31))
    assert list(map(float, ends)) == pytest.approx([float(ends[0])] * 3, abs=0.01)
    assert "with a batch of 32: 2 graphs compiled" in said(31)
    assert "with another tensor: the replay has the old batch" in said(31)
    tried = re.findall(r"^(\S+): (\d) graph breaks; (captured|fails)", said(31), re.MULTILINE)
    assert {kind: (breaks != "0", end) for kind, breaks, end in tried} == {
        "plain": (False, "captured"),
        "torch.where": (False, "captured"),
        ".item()": (True, "fails"),
        "if": (True, "fails"),
    }


def test_a_file_per_sample_is_an_open_per_sample_and_shards_are_opened_once() -> None:
    line = r"(\d+) readers, (files|shards|packed): ([\d,]+) opens"
    opens = {(one, way): int(n.replace(",", "")) for one, way, n in re.findall(line, said(32))}
    assert [opens[one, "files"] for one in ("1", "4", "16")] == [1437] * 3
    assert [opens[one, "shards"] for one in ("1", "4", "16")] == [5, 20, 80]
    assert all(0 < opens[one, "packed"] < 10 * int(one) for one in ("1", "4", "16"))


def test_the_rank_that_sleeps_is_the_straggler_by_hand_and_for_paceline() -> None:
    by_hand, named = commands(28)
    assert "the straggler is rank 1" in by_hand
    assert re.search(r"^rank 1 \(.*\) is slow: .* in forward", named, re.MULTILINE), named


def test_digests_find_what_the_loss_does_not_show() -> None:
    by_hand, checked = commands(29)
    line = (
        r"fault (\w+): loss ([\d.]+), (?:all ranks hold|after step (\d+) rank (\d) differs in (\d))"
    )
    kinds, ends, *found = zip(*re.findall(line, by_hand), strict=True)
    assert kinds == ("none", "bit", "rate")
    assert list(map(float, ends)) == pytest.approx([float(ends[0])] * 3, abs=0.01)
    assert found == [("", "10", "10"), ("", "3", "3"), ("", "1", "6")]
    assert "after step 12 rank 1 has other values than rank 0 in model.2.weight" in checked


def test_a_container_hides_what_it_is_not_told_to_pass_on() -> None:
    rows = {line[:17].strip(): re.split(r" {2,}", line[17:]) for line in said(33).splitlines()}
    assert rows["rank"][:3] == ["0 of 2, 1 of 2", "0 of 1, 0 of 1", "0 of 2, 1 of 2"]
    assert rows["sum of ranks"][:3] == ["1", "0", "1"]
    if "this failed here" not in said(33):  # some systems forbid containers, and the lesson says so
        assert rows["host name"][1] == "box"
        assert rows["launcher's port"][:3] == ["ok", "Connection refused", "ok"]
        assert rows["100 MB of shm"][1] == "No space left on device"
        assert rows["checkpoint of"][1] == "user 0, outside: lost"
    assert said(33).count("srun --nodes=2 --ntasks=8") == 3
    assert "--env SLURM_PROCID" in " ".join(said(33).partition("docker:")[2].split())


def test_a_study_by_hand_adds_up_and_paceline_measures_the_same_sizes() -> None:
    line = r"(\w+), ranks (\d): ([\d.]+) ± [\d.]+ ms, speed-up ([\d.]+) ± [\d.]+, efficiency (\d+)%"
    rows = {(kind, int(ranks)): tuple(map(float, row)) for kind, ranks, *row in re.findall(line, said(34))}  # fmt: skip
    assert rows.keys() == {(kind, ranks) for kind in ("strong", "weak") for ranks in (1, 2, 4)}
    for (kind, ranks), (step_ms, speed_up, percent) in rows.items():
        work = ranks if kind == "weak" else 1
        assert speed_up == pytest.approx(rows[kind, 1][0] / step_ms * work, abs=0.02)
        assert percent == pytest.approx(100 * speed_up / ranks, abs=1.1)
    costs = re.findall(r"steps, ranks (\d): ([\d.]+) ± [\d.]+ node-hours", said(34))
    for (ranks, cost), nodes in zip(costs, (1, 1, 2), strict=True):
        hours = rows["strong", int(ranks)][0] * 1e3 / 3600  # of a million steps
        assert float(cost) == pytest.approx(nodes * hours, abs=0.2)
    assert re.search(r"serial part [\d.-]+% ± ", said(34))
    measured = re.findall(r"^ +(\d) +[\d.,]+ ms", said(34), re.MULTILINE)
    assert measured == ["1", "2", "4"]


def test_adapters_train_and_send_few_bytes_and_leave_the_base_model_as_it_is() -> None:
    line = r"(full|LoRA): ([\d,]+) trained, ([\d,]+) bytes sent per step, ([\d,]+) bytes saved"
    sizes = {way: [int(one.replace(",", "")) for one in rest] for way, *rest in re.findall(line, said(35))}  # fmt: skip
    assert all(30 * few < many for few, many in zip(sizes["LoRA"], sizes["full"], strict=True))
    before = set(re.findall(r"mirror images ([\d.]+) before", said(35)))
    after = re.findall(r"LoRA: mirror images [\d.]+ before, ([\d.]+) after", said(35))
    assert float(after[0]) > float(before.pop()) + 0.2
    assert not before, "both begin with the base model"
    assert "full: old digits" in said(35)
    assert said(35).count("weights: the bits of the base model") == 1
