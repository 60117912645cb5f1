"""The examples: what their parts decide, that they train and serve for real, and the demonstration as a whole."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import load  # noqa: E402
from demonstration import phases, processes, report  # noqa: E402

PATIENCE_SECONDS = 300.0
# One process makes the repository of models, which lies in the checkout.
pytestmark = [pytest.mark.deadline(PATIENCE_SECONDS), pytest.mark.xdist_group("examples")]
RATES = {"minilm": 50.0, "silero_vad": 20.0}


def run(*command: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=PATIENCE_SECONDS,
                          check=False, **options)


def lines_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


# --- the plan of a load -----------------------------------------------------------------------------------------------


def test_no_request_is_planned_for_an_idle_phase():
    planned = load.plan(RATES, on=2.0, off=3.0, seconds=60.0, seed=1)
    assert planned
    assert all(each.at % 5.0 <= 2.0 for each in planned)


def test_requests_come_at_the_rate_while_the_load_is_on():
    planned = load.plan(RATES, on=2.0, off=3.0, seconds=500.0, seed=1)
    for model, rate in RATES.items():
        count = sum(each.model == model for each in planned)
        expected = rate * 200.0
        assert abs(count - expected) < 5 * math.sqrt(expected), model  # five standard deviations of a Poisson count


def test_gaps_between_requests_are_exponential():
    planned = load.plan({"minilm": 10.0}, on=1e9, off=0.0, seconds=1000.0, seed=3)
    gaps = [b.at - a.at for a, b in zip(planned, planned[1:])]
    longer_than_mean = sum(gap > 0.1 for gap in gaps) / len(gaps)
    assert abs(longer_than_mean - math.exp(-1)) < 0.02


def test_the_same_seed_plans_the_same_requests_whichever_models_are_beside():
    both = load.plan(RATES, 2.0, 3.0, 20.0, seed=7)
    assert both == load.plan(RATES, 2.0, 3.0, 20.0, seed=7)
    assert both != load.plan(RATES, 2.0, 3.0, 20.0, seed=8)
    alone = load.plan({"minilm": RATES["minilm"]}, 2.0, 3.0, 20.0, seed=7)
    assert alone == [each for each in both if each.model == "minilm"]


def test_a_quantile_is_a_value_that_occurred():
    assert load.quantiles(range(1, 101)) == {"n": 100, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert load.quantiles([7.0]) == {"n": 1, "p50": 7.0, "p90": 7.0, "p99": 7.0, "max": 7.0}
    assert load.quantiles([])["p50"] is None


# --- the judgement of an answer ---------------------------------------------------------------------------------------


@pytest.fixture
def samples(tmp_path):
    expected = [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.25, -1.0]}]
    file = tmp_path / "model.jsonl"
    file.write_text(json.dumps({"inputs": [], "expected": expected}) + "\n")
    return load.Samples(file, tolerance=1e-3)


def answer(**changes: object) -> bytes:
    tensor = {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.2504, -1.0], **changes}
    return json.dumps({"outputs": [tensor]}).encode()


def test_an_answer_within_the_tolerance_is_right(samples):
    right, error = samples.judge(5, answer())
    assert right and error == pytest.approx(4e-4)


@pytest.mark.parametrize("wrong", [
    answer(data=[0.26, -1.0]), answer(data=["NaN", -1.0]), answer(data=["Infinity", -1.0]), answer(data=[0.25]),
    answer(data=[0.25, -1.0, 0.0]), answer(data=[0.25, None]), answer(shape=[2, 1]), answer(datatype="FP64"),
    answer(name="z"), b"{}", b'{"outputs": []}', b"no JSON", b"",
])
def test_any_other_answer_is_wrong(samples, wrong):
    assert not samples.judge(0, wrong)[0]


# --- the claims of the demonstration ----------------------------------------------------------------------------------


def training_log(slices: list[int], discards: int, loss: float) -> phases.Training:
    """A log with one step a second."""
    lines, commits = [], 0
    for step, cuts in enumerate(slices, start=1):
        commits += cuts
        lines.append({"step": step, "seconds": float(step), "loss": loss, "samples": 64 * step, "commits": commits,
                      "discards": discards, "micro_batch": 64 // cuts})
    return phases.Training([*lines, {**lines[-1], "final": True}])


def kept_promises() -> dict:
    """Results with which nothing is missing."""
    latencies = {"n": 3, "p50": 5.0, "p90": 6.0, "p99": 7.0, "max": 7.0}
    result = {"sent": 6, "right": 6, "wrong": 0, "failed": 0, "max_error": 1e-7, "first_error": None,
              "warm_ms": latencies, "cold_ms": latencies}
    load_summary = {"models": {model: copy.deepcopy(result) for model in RATES}, "sent_late_ms": latencies}
    status = {
        "handovers": {"count": 2, "bytes_to_serving": 90 << 20, "bytes_to_training": 90 << 20,
                      "latency_us": {"n": 2, "p50": 900.0, "p90": 990.0, "p99": 990.0, "max": 990.0}},
        "models": [{"name": model, "predicted_attainment": 0.99, "observed_attainment": 1.0} for model in RATES]}
    looks = [{"training": 400, "serving": 0}, {"training": 300, "serving": 90}, {"training": 400, "serving": 0}]
    return {"setting": phases.SETTINGS["host"], "alone": training_log([1] * 12, 0, 2.5),
            "serving": copy.deepcopy(load_summary),
            "both": phases.Together(training_log([1] * 4 + [2, 2] + [1] * 6, 1, 2.5), load_summary, status, looks)}


def test_nothing_is_missing_where_all_that_is_shown_happened():
    results = kept_promises()
    assert report.shortfalls(**results) == []
    text = report.as_text(report.rows(**results))
    for shown in ("training, samples/s", "64.0 (100%)", "loss after 12 steps", "minilm, cold", "12 of 12", "0.90 / 0.99",
                  "90 MiB, 90 MiB", "predicted 99.0%, observed 100.0%"):
        assert shown in text


def no_discard(results: dict) -> None:
    results["both"].training = training_log([1] * 12, 0, 2.5)


@pytest.mark.parametrize(("told", "spoil"), [
    ("no memory was handed over", lambda r: r["both"].status["handovers"].update(count=0)),
    ("no memory went from training", lambda r: r["both"].status["handovers"].update(bytes_to_serving=0)),
    ("flow back", lambda r: r["both"].looks.pop()),
    ("never had to discard", no_discard),
    ("gave 1 wrong answers", lambda r: r["both"].load["models"]["minilm"].update(wrong=1)),
    ("gave 1 wrong answers", lambda r: r["serving"]["models"]["silero_vad"].update(wrong=1)),
    ("no right answer", lambda r: r["both"].load["models"]["minilm"].update(right=0)),
    ("failed 2 requests", lambda r: r["both"].load["models"]["minilm"].update(failed=2)),
    ("no request beside training met a cold model",
     lambda r: [m.update(cold_ms={"n": 0, "p50": None, "p99": None}) for m in r["both"].load["models"].values()]),
    ("no predicted attainment", lambda r: r["both"].status["models"][0].update(predicted_attainment=None)),
    ("no observed attainment", lambda r: r["both"].status["models"].pop()),
    ("the loss differs", lambda r: r["both"].training.final.update(loss=2.501)),
    ("the loss differs", lambda r: r["both"].training.final.update(loss=float("nan"))),
    ("11 steps beside serving", lambda r: r["both"].training.final.update(step=11)),
    ("stood still", lambda r: r["both"].training.final.update(seconds=1e5)),
])
def test_each_claim_that_did_not_come_true_is_told(told, spoil):
    results = kept_promises()
    spoil(results)
    missing = report.shortfalls(**results)
    assert any(told in each for each in missing), missing
    report.as_text(report.rows(**results))  # the table can be shown all the same


def test_a_taken_port_is_not_tried():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert processes.usable_port(other.getsockname()[1]) == 0


# --- training ---------------------------------------------------------------------------------------------------------


def train(script: str, log: Path, *arguments: object, under: tuple = ()) -> list[dict]:
    """Runs a training example on the CPU and returns its log."""
    done = run(*under, sys.executable, EXAMPLES / script, "--device", "cpu", "--log", log, "--log-interval", "0",
               "--deterministic", *arguments)
    assert done.returncode == 0, done.stderr
    return lines_of(log)


def test_the_digits_are_learnt(tmp_path):
    steps = train("train_digits.py", tmp_path / "log", "--steps", 60, "--batch", 64, "--least-accuracy", 0.9)
    assert [line["step"] for line in steps] == [*range(1, 61), 60]
    assert steps[-1]["loss"] < 0.3 < 2.0 < steps[0]["loss"]


@pytest.mark.parametrize("dealt", [(), ("--balance", "--workers", 1)], ids=["in-equal-parts", "balanced"])
def test_the_digits_are_learnt_by_two_processes_in_one_pool(sluice, runtime_folder, tmp_path, dealt):
    steps = train("train_digits.py", tmp_path / "log", "--steps", 60, "--batch", 32, "--least-accuracy", 0.9, *dealt, under=(
        sluice, "run", "--runtime-dir", runtime_folder, "--memory", "256MiB", "--require-pool", "--", sys.executable, "-m",
        "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python", "--"))
    assert [line["step"] for line in steps] == [*range(1, 61), 60]


def test_an_accuracy_that_is_not_reached_is_a_failure():
    done = run(sys.executable, EXAMPLES / "train_digits.py", "--device", "cpu", "--steps", 1, "--least-accuracy", 0.99)
    assert done.returncode == 1
    assert "less than 99.0%" in done.stderr


SMALL = ("--steps", 6, "--batch", 8, "--width", 32, "--layers", 2, "--heads", 2, "--context", 32, "--groups", 1024,
         "--micro-batch", 8)


def test_micro_batches_change_the_loss_by_rounding_alone(tmp_path):
    whole = train("train_charlm.py", tmp_path / "whole", *SMALL)
    sliced = train("train_charlm.py", tmp_path / "sliced", *SMALL, "--micro-batch", 3)  # the last one counts
    assert sliced[-1]["commits"] == 3 * whole[-1]["commits"]
    assert sliced[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-5)
    assert whole[-1]["loss"] < whole[0]["loss"]


def test_a_script_learns_the_same_in_the_pool_as_in_plain_torch(tmp_path, sluice):
    plain = train("train_charlm.py", tmp_path / "plain", *SMALL)
    shared = train("train_charlm.py", tmp_path / "shared", *SMALL, under=(
        sluice, "run", "--require-pool", "--backend", "host", "--memory", "256MiB", "--"))
    assert [line["loss"] for line in shared] == [line["loss"] for line in plain]


@pytest.mark.parametrize(("arguments", "told"), [
    ((), "say when to end"), (("--steps", 0), "at least 1"), (("--steps", 1, "--width", 31), "no multiple of --heads"),
])
def test_wrong_arguments_of_training_are_told(arguments, told):
    done = run(sys.executable, EXAMPLES / "train_charlm.py", "--device", "cpu", *arguments)
    assert done.returncode not in (0, None)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


# --- serving ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def repository() -> Path:
    folder = EXAMPLES / "model_repository"
    done = run(sys.executable, EXAMPLES / "prepare_models.py")
    assert done.returncode == 0, done.stderr
    return folder


def test_models_that_are_prepared_are_left_as_they_are(repository):
    def written() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in repository.rglob("*") if file.is_file()}

    before = written()
    again = run(sys.executable, EXAMPLES / "prepare_models.py")
    assert again.returncode == 0 and "up to date" in again.stdout
    assert written() == before


def test_a_folder_of_somebody_else_is_not_overwritten(tmp_path):
    (tmp_path / "model").mkdir()
    done = run(sys.executable, EXAMPLES / "prepare_models.py", "--into", tmp_path)
    assert done.returncode == 1 and "not made by this program" in done.stderr
    assert (tmp_path / "model").is_dir()


def test_the_load_finds_cold_and_warm_answers_right(sluice, repository, tmp_path):
    with processes.Stage(sluice, tmp_path) as stage:
        summary = phases.serving_alone(stage, phases.SETTINGS["host"], seed=1, port=0, seconds=4.0, on=1.0, off=0.5)
    for model, result in summary["models"].items():
        assert result["right"] == result["sent"] > 0, (model, result)
        assert result["cold_ms"]["n"] > 0 and result["max_error"] < 1e-4, (model, result)
    requests = lines_of(tmp_path / "requests.jsonl")
    assert len(requests) == sum(result["sent"] for result in summary["models"].values())
    assert all(each["latency_ms"] >= (each["done_s"] - each["sent_s"]) * 1e3 - 1e-6 for each in requests)


def test_a_load_without_a_server_says_so(repository):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        done = run(sys.executable, EXAMPLES / "load.py", "--url", f"http://127.0.0.1:{nobody.getsockname()[1]}",
                   "--requests", repository / ".requests", "--rate", "minilm=1")
    assert done.returncode == 1 and "no server at" in done.stderr
    assert "Traceback" not in done.stderr


# --- the demonstration ------------------------------------------------------------------------------------------------


@pytest.mark.deadline(900)
def test_the_demonstration_shows_what_it_claims(sluice, repository, tmp_path):
    with socket.socket() as other:  # its port is taken
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = subprocess.run(
            [sys.executable, EXAMPLES / "quickstart.py", "--sluice", sluice, "--backend", "host", "--logs", tmp_path,
             "--json", tmp_path / "results.json", "--port", str(other.getsockname()[1])],
            capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "handover p50 / p99 ms" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["shortfalls"] == [] and results["status"]["handovers"]["count"] > 0


def running_below(marker: str) -> list[str]:
    """Command lines of processes whose environment names `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demonstration_leaves_no_process(sluice, repository, tmp_path, number):
    marker = f"DEMONSTRATION_OF_TEST={os.getpid()}-{number}"
    name, _, value = marker.partition("=")
    demonstration = subprocess.Popen(
        [sys.executable, EXAMPLES / "quickstart.py", "--sluice", sluice, "--backend", "host", "--logs", tmp_path,
         "--seconds", "600"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, name: value})
    log = tmp_path / "training-alone" / "steps.jsonl"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (log.exists() and log.stat().st_size):
        assert demonstration.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert any(re.search(r"\bsluice broker\b", each) for each in running_below(marker))
    demonstration.send_signal(number)
    _, errors = demonstration.communicate(timeout=PATIENCE_SECONDS)
    assert demonstration.returncode == 128 + number, errors
    assert running_below(marker) == []
