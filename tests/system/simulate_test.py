"""`sluice simulate` as a user runs it."""

import csv
import subprocess

import pytest


def simulate(sluice, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sluice, "simulate", *arguments], capture_output=True, text=True, check=False)


def test_policies_are_compared_in_a_table_and_a_file(sluice, tmp_path):
    figures = tmp_path / "figures.csv"
    done = simulate(sluice, "--trace", "poisson:rate=2", "--length", "20m", "--models", "2", "--gpus", "2", "--policy", "ours:0B",
                    "--policy", "cold", "--policy", "always", "--load", "1s", "--latency", "500ms", "--csv", str(figures))
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["policy", "ours:0B", "cold", "always"]
    assert done.stderr == ""  # no progress where nobody looks
    with figures.open() as file:
        rows = {(row["policy"], row["model"]): row for row in csv.DictReader(file)}
    assert len(rows) == 9
    assert float(rows["cold", "all"]["released_share"]) > 0.2 > float(rows["always", "all"]["released_share"]) == 0.0
    assert float(rows["cold", "all"]["in_time"]) < float(rows["always", "all"]["in_time"])
    assert float(rows["always", "all"]["predicted_in_time"]) == pytest.approx(float(rows["always", "all"]["in_time"]), abs=0.02)


def test_a_run_can_be_repeated(sluice):
    words = ("--trace", "hawkes:rate=2,branching=0.5,decay=1", "--length", "10m", "--seed", "7")
    assert simulate(sluice, *words).stdout == simulate(sluice, *words).stdout


def test_every_format_is_known_by_its_first_line(sluice, tmp_path):
    lines = {
        "llm": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:05.0319600,3180,8",
        "functions": "app,func,end_timestamp,duration\na,f,1.5,0.2\na,g,3.5,0.2\n",
        "mooncake": '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1]}\n{"timestamp": 1500, "input_length": 6, "output_length": 5}\n',
        "columns": "time_s,model\n0,bert\n2,resnet\n"}
    for name, text in lines.items():
        file = tmp_path / name
        file.write_bytes(text.encode())
        done = simulate(sluice, "--trace", str(file), "--policy", "always")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("2 requests of "), name


@pytest.mark.parametrize("text, said", [("time_s\n1\nsoon\n", "3: time_s is 'soon', must be a number"), ("time_s\n2\n1\n", "3: its time is 1.000 s before"),
                                        ("when\n1\n", "1: column 'when' is not known"), ("", ": has no requests")])
def test_a_bad_trace_is_refused_with_file_and_line(sluice, tmp_path, text, said):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    done = simulate(sluice, "--trace", str(file))
    assert done.returncode == 2
    assert f"{file}:{said}" in done.stderr or f"{file}{said}" in done.stderr


def test_what_is_not_there_is_named(sluice, tmp_path):
    assert "cannot be opened" in simulate(sluice, "--trace", str(tmp_path / "none.csv")).stderr
    assert "there is no policy 'lru'" in simulate(sluice, "--trace", "poisson:rate=2", "--policy", "lru").stderr
    assert "there is no record" in simulate(sluice, "--trace", "poisson:rate=2", "--records", str(tmp_path), "--machine", "box").stderr
    assert "--skip is 2h" in simulate(sluice, "--trace", "poisson:rate=2", "--skip", "2h").stderr
