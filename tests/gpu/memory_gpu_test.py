"""What users of torch know about memory keeps working in the pool, while handovers take the arena away (real GPU)."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.deadline(180)]

CHECKOUT = Path(__file__).resolve().parents[2]
DRIVER_JOBS = ("foreign", "small", "info", "fraction", "history", "ipc")
MIB, GIB = 1 << 20, 1 << 30
CHUNK = 64 * MIB
DEMAND = 384 * MIB
DEMANDS = 60
FEWEST_DISCARDS = 8


@dataclass(frozen=True)
class Ended:
    said: dict
    complaints: str


@pytest.fixture
def job(sluice, tmp_path, runtime_folder):
    """Runs a job of arena_job.py or driver_job.py to its end, with so many handovers in between."""

    def run(name: str, demands: int = 0, pool: str = "12GiB") -> Ended:
        until, out, log = tmp_path / "until", tmp_path / "out.json", tmp_path / "job.log"
        package = os.pathsep.join(filter(None, [str(CHECKOUT / "runtime" / "python"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": package, "SLUICE_BROKER": str(sluice)}
        program = Path(__file__).with_name("driver_job.py" if name in DRIVER_JOBS else "arena_job.py")
        with log.open("wb") as complaints:
            training = subprocess.Popen(
                [sluice, "run", "--backend", "cuda", "--memory", pool, "--require-pool", "--",
                 sys.executable, program, name, until, out], stdout=subprocess.PIPE, stderr=complaints, env=environment)
        try:
            first = training.stdout.readline()
            assert first == b"ready\n", f"{first!r}\n{log.read_text()[-4000:]}"
            if demands:
                server = subprocess.run(
                    [sluice.with_name("sluice-bench-handover"), "--runtime-dir", runtime_folder, "--bytes", str(DEMAND),
                     "--count", str(demands), "--delay-ms", "100", "--range"], env=environment,
                    capture_output=True, text=True, check=False)
                assert server.returncode == 0, f"{server.stderr}\n{log.read_text()[-4000:]}"
            until.touch()
            assert training.wait(120) == 0, log.read_text()[-4000:]
        finally:
            training.kill()
            training.wait()
            training.stdout.close()
        print(f"{name}: {out.read_text()[:2000]}")
        return Ended(json.loads(out.read_text()), log.read_text())

    return run


def expect_steady(said: dict, fewest_discards: int) -> None:
    """Steps after a discard leave what undisturbed ones leave."""
    base_reserved, base_allocated = said["base"]
    assert said["discards"] >= fewest_discards
    assert len(said["seen"]) >= fewest_discards // 2  # several discards may meet one step
    reserved = [each for each, _ in said["seen"]]
    assert max(reserved) <= 1.1 * base_reserved + CHUNK
    assert sum(reserved[-5:]) / 5 <= sum(reserved[:5]) / 5 + CHUNK
    assert max(allocated for _, allocated in said["seen"]) <= base_allocated + MIB


def test_reserved_and_allocated_bytes_are_the_truth_after_discards(job):
    expect_steady(job("stats", demands=120).said, fewest_discards=20)


def test_blocks_that_a_side_stream_has_used_are_used_again(job):
    expect_steady(job("side_streams", DEMANDS).said, FEWEST_DISCARDS)


def test_a_micro_batch_that_leaves_its_blocks_in_pieces_gets_one_segment(job):
    said = job("growing", DEMANDS).said
    assert said["discards"] >= FEWEST_DISCARDS
    first, *others = said["segments"]["one stream"]
    assert max(others) <= 0.5 * first
    both, *others = said["segments"]["two streams"]
    assert both > first and max(others[1:]) < both
    assert all(value == value for value in said["values"])


def test_snapshots_and_recorded_history_show_the_arena(job):
    said = job("snapshot", DEMANDS).said
    assert said["discards"] >= FEWEST_DISCARDS
    assert said["segments"].get("of the arena", 0) > 0 and "other" not in said["segments"]
    assert {"alloc", "free_completed", "segment_alloc"} <= said["actions"].keys()
    assert said["traced"] and said["pickled"] > 1000


def test_a_micro_batch_too_large_for_the_pool_is_cut_and_a_sample_too_large_is_refused(job):
    said = job("shortage", pool="6GiB").said
    assert said["stats"]["discards"] > 0 and said["stats"]["micro_batch"] < 8
    assert said["value"] == pytest.approx(said["expected"], rel=1e-3)
    assert said["again"] == pytest.approx(said["expected"], rel=1e-3)
    assert said["gradient"] == pytest.approx(2 * said["expected"], rel=1e-3)
    assert "of the pool's 6 GiB this job holds " in said["refused"]


def test_torch_gives_up_its_cache_when_the_pool_has_no_more_and_then_says_who_holds_it(job):
    ended = job("cache_release", pool="8GiB")
    said = ended.said
    assert said["left"] <= 0.3 * said["free"] and said["cached"] <= 0.3 * said["free"], "torch did not keep its cache"
    for message in (said["outside"], said["inside"]):
        assert "CUDA out of memory" in message
    assert "of the pool's 8 GiB this job holds " in said["inside"]
    assert ended.complaints.count("sluice: of the pool's 8 GiB this job holds ") == 1  # for the one outside of a step


def test_graphs_captured_before_and_inside_a_micro_batch_replay_rightly(job):
    said = job("graphs", DEMANDS).said
    assert said["discards"] >= FEWEST_DISCARDS
    assert said["values"] == pytest.approx([said["expected"]] * len(said["values"]), rel=1e-4)


def test_what_another_thread_trains_is_neither_lost_nor_aborted(job):
    said = job("threads", DEMANDS).said
    assert said["failures"] == []
    assert said["discards"] >= FEWEST_DISCARDS
    assert len(said["beside"]) > 0 and said["beside"] == said["alone"]


def test_a_tensor_that_outlives_its_commit_keeps_its_values_through_handovers(job):
    ended = job("kept_of_commits", DEMANDS)
    assert ended.said["discards"] >= FEWEST_DISCARDS
    assert ended.said["intact"]
    assert ended.said["without"] < ended.said["with"], "its arena was not given back"
    assert ended.complaints.count("made in a micro-batch live on after it") == 1


def test_a_tensor_kept_of_a_discarded_micro_batch_is_an_error_after_which_training_goes_on(job):
    said = job("kept_of_discards", DEMANDS).said
    assert len(said["raised"]) >= 1
    assert "of a discarded micro-batch are still referenced" in said["raised"][0]
    assert said["loss"] == said["loss"] and said["discards"] >= FEWEST_DISCARDS


def test_library_workspaces_born_in_a_micro_batch_are_no_survivors(job):
    said = job("workspaces", DEMANDS).said
    assert said["discards"] >= FEWEST_DISCARDS
    assert said["steps"] > 0 and said["finite"]


def test_what_the_rehearsal_of_a_compiled_model_needs_goes_back(job):
    said = job("compiled").said
    assert said["needed"] > GIB
    assert said["persistent"] <= said["needed"] / 4


def test_memory_of_other_libraries_is_persistent_pool_memory(job, sluice):
    said = job("foreign", DEMANDS).said
    assert said["discards"] >= FEWEST_DISCARDS
    assert said["intact"] == [True] * 4
    for address in said["addresses"]:
        # The server's own memory may lie at the same addresses in its process.
        told = subprocess.run([sluice, "pool", "show", "--json", "--pid", str(said["pid"]), "--address", hex(address)],
                              capture_output=True, check=True)
        stays = json.loads(told.stdout)["stays"]
        assert stays and {stay["holds"] for stay in stays} == {"persistent"}


def test_small_allocations_share_chunks(job):
    said = job("small", pool="6GiB").said
    assert said["bytes"] <= said["driver"] + CHUNK
    assert said["driver"] <= said["bytes"] + 2 * CHUNK
    assert said["torch"] <= max(said["reserved"], said["driver"]) + 2 * CHUNK
    assert max(said["missing"]) <= CHUNK  # once freed


def test_memory_info_tells_what_the_job_can_have(job):
    said = job("info", pool="8GiB").said
    (free, total), (with_tensor, _), (after, _) = said["first"], said["second"], said["third"]
    assert {pair[1] for pair in (said["first"], said["second"], said["third"])} == {8 * GIB} and total == 8 * GIB
    assert free <= total - said["reserved"] + CHUNK
    assert free - with_tensor == pytest.approx(GIB, abs=CHUNK)
    assert after == pytest.approx(free, abs=CHUNK)


def test_a_share_of_the_memory_bounds_the_job_though_segments_become_expandable(job):
    said = job("fraction", pool="8GiB").said
    assert said["sizes"] == [8 * GIB, 8 * GIB]
    assert "out of memory" in said["raised"][0] and said["raised"][1] == ""


def test_history_shows_which_segments_were_freed_and_by_whom(job):
    assert job("history").said == {"alloc": {"freed": 1, "by": False}, "all": {"freed": 1, "by": True}}


def test_sending_a_tensor_to_another_process_fails_with_a_word_on_why(job):
    ended = job("ipc")
    assert len(ended.said["raised"]) >= 2 and all(ended.said["raised"])
    assert ended.said["sum"] == 1024
    assert ended.complaints.count("cuIpcGetMemHandle") == 1
