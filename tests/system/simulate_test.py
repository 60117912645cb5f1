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


def test_a_device_has_the_memory_that_it_is_told_and_no_model_may_be_larger(sluice, tmp_path):
    figures = tmp_path / "figures.csv"
    words = ("--trace", "poisson:rate=1,zipf=1", "--length", "1h", "--models", "8", "--size", "7GiB", "--latency", "400ms", "--percentile", "90%", "--service", "50ms", "--policy", "always", "--policy", "partial", "--csv", str(figures))
    in_time = {}
    for memory in ("56GiB", "28GiB"):
        done = simulate(sluice, *words, "--memory", memory)
        assert done.returncode == 0, done.stderr
        with figures.open() as file:
            rows = {row["policy"]: row for row in csv.DictReader(file) if row["model"] == "all"}
        in_time |= {(memory, policy): float(row["in_time"]) for policy, row in rows.items()}
        assert (float(rows["always"]["released_share"]) == 0.0) == (memory == "56GiB")
        assert float(rows["partial"]["released_share"]) > 0.4
    assert in_time["28GiB", "always"] < in_time["56GiB", "always"] - 0.02
    assert in_time["28GiB", "partial"] > 0.9
    done = simulate(sluice, *words, "--memory", "3GiB")
    assert done.returncode == 2
    assert "has 7 GiB, and no room on device 0, which has 3 GiB; give more --memory, or a smaller --size" in done.stderr


FUNCTIONS = "app,func,end_timestamp,duration\n"


def functions_trace(file, rates: dict[str, int], seconds: int = 600) -> str:
    """A trace as Azure's of 2021: each function so many times a second, a twentieth of one each."""
    lines = sorted((second + (i + 0.5) / rate + 0.05, func) for func, rate in rates.items() for second in range(seconds) for i in range(rate))
    file.write_text(FUNCTIONS + "".join(f"app,{func},{end:.6f},0.05\n" for end, func in lines))
    return str(file)


def placed(file) -> dict[str, list[str]]:
    """The devices of each model."""
    found: dict[str, list[str]] = {}
    with file.open() as text:
        for row in csv.DictReader(text):
            found.setdefault(row["model"].split("/")[-1], []).extend([row["device"]] if row["device"] else [])
    return found


def test_models_of_a_trace_are_placed_by_attainment(sluice, tmp_path):
    trace = functions_trace(tmp_path / "functions.csv", {"often": 24, "some": 8, "other": 7, "rare": 1})
    where, figures = tmp_path / "where.csv", tmp_path / "figures.csv"
    words = ("--trace", trace, "--gpus", "4", "--size", "4GiB", "--memory", "8GiB", "--latency", "400ms", "--policy", "always")
    done = simulate(sluice, *words, "--place", "attainment", "--place-csv", str(where), "--csv", str(figures))
    assert done.returncode == 0, done.stderr
    assert "placed by attainment: " in done.stdout
    found = placed(where)
    assert len(found) == 4
    assert len(found["often"]) >= 2, "one device cannot do what it is asked for"
    with figures.open() as file:
        rows = {row["model"].split("/")[-1]: row for row in csv.DictReader(file)}
    assert int(rows["often"]["requests"]) == 24 * 600, "a model's replicas are one line"
    assert float(rows["all"]["in_time"]) > 0.95
    assert simulate(sluice, *words, "--place", "attainment").stdout == done.stdout
    for rule in ("round-robin", "first-fit", "work"):
        assert simulate(sluice, *words, "--place", rule, "--place-csv", str(where), "--csv", str(figures)).returncode == 0
        assert {len(each) for each in placed(where).values()} == {1}, rule
        with figures.open() as file:
            assert float(next(csv.DictReader(file))["in_time"]) < 0.6, rule


def test_a_model_that_fits_nowhere_is_named_with_the_numbers_and_its_requests_count(sluice, tmp_path):
    trace = functions_trace(tmp_path / "functions.csv", {"small": 3, "large": 1}, seconds=60)
    where = tmp_path / "where.csv"
    done = simulate(sluice, "--trace", trace, "--gpus", "2", "--size", "2GiB,20GiB", "--memory", "4GiB,16GiB", "--latency", "1s",
                    "--place", "attainment", "--place-csv", str(where), "--policy", "always")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("on no device: ")]
    assert len(lines) == 1 and "large needs 20.00 GiB, and the largest device (1) has 16.00 GiB" in lines[0]
    in_time, predicted = map(float, done.stdout.splitlines()[-1].split()[1:3])
    assert in_time == 75.0
    assert predicted == pytest.approx(75.0, abs=0.5)
    assert placed(where)["large"] == [] and "largest device" in where.read_text()


@pytest.mark.parametrize("words, said", [
    (("--place", "best"), "there is no placing 'best'; there are attainment, work, round-robin and first-fit"),
    (("--place-csv", "x"), "--place-csv requires --place"), (("--place-timeout", "1s"), "--place-timeout requires --place"),
    (("--place", "attainment", "--place-timeout", "soon"), "--place-timeout"),
    (("--gpus", "3", "--memory", "1GiB,2GiB"), "--memory has 2 sizes for 3 devices; it must have one for all, or one for each of --gpus"),
    (("--models", "3", "--size", "1GiB,2GiB"), "there are 2 sizes for 3 models; there must be one for all, or one for each"),
    (("--place", "first-fit", "--size", "90GiB"), "no model has room on a device: the first, m0, needs 90.00 GiB, and the largest device (0) has 80.00 GiB")])
def test_a_placing_that_cannot_be_is_refused_with_what_could(sluice, words, said):
    done = simulate(sluice, "--trace", "poisson:rate=2", "--length", "1m", *words)
    assert done.returncode == 2
    assert said in done.stderr
