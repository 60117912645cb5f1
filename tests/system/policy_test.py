"""`sluice policy` and `sluice serve` with policy files, right and wrong; the shipped schema."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from launching import call

VALID = """\
version: 1
server: {model_repository: models}
models:
  - name: resnet
    slo: {latency: 150ms}
"""

WRONG = """\
version: 1
server: {prot: 8000}
models:
  - name: resnet
    slo: {latency: 150}
"""

COMPLAINTS = [
    '{file}:2:10: server.prot: is no known key; did you mean "port"?',
    '{file}:5:20: models[0].slo.latency: "150" has no unit; add us, ms, s, m or h, '
    "for example 200ms",
]


def written(folder: Path, text: str) -> Path:
    file = folder / "policy.yaml"
    file.write_text(text)
    return file


def test_a_valid_policy_is_summed_up_in_a_line(sluice, tmp_path):
    file = written(tmp_path, VALID)
    done = call(sluice, "policy", "check", file)
    assert done.returncode == 0
    assert done.stdout == (
        f"{file}: valid; models: resnet; pool: auto on backend auto; listens on 127.0.0.1:8000\n"
    )
    assert not done.stderr


def test_every_mistake_is_told_and_nothing_else(sluice, tmp_path):
    file = written(tmp_path, WRONG)
    done = call(sluice, "policy", "check", file)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [line.format(file=file) for line in COMPLAINTS]
    assert not done.stdout


def test_a_policy_may_come_from_a_pipe(sluice):
    assert call(sluice, "policy", "check", "/dev/stdin", input=VALID).returncode == 0


def test_a_missing_policy_is_told(sluice, tmp_path):
    done = call(sluice, "policy", "check", tmp_path / "none.yaml")
    assert done.returncode == 1
    assert done.stderr == (
        f"{tmp_path}/none.yaml:1:1: there is no such file; give the path of a policy file\n"
    )


def test_serving_with_a_wrong_policy_tells_the_same(sluice, tmp_path, runtime_folder):
    file = written(tmp_path, WRONG)
    done = call(sluice, "serve", "--policy", file)
    assert done.returncode == 2
    for line in COMPLAINTS:
        assert line.format(file=file) in done.stderr
    assert not list(runtime_folder.iterdir()), "nothing was started"


def test_serving_without_a_policy_file_is_not_found(sluice, tmp_path):
    assert call(sluice, "serve", "--policy", tmp_path / "none.yaml").returncode == 3


def test_the_schema_that_is_printed_is_the_one_that_is_shipped(sluice, checkout):
    printed = call(sluice, "policy", "schema")
    assert printed.returncode == 0
    assert printed.stdout == (checkout / "runtime" / "policy" / "policy.schema.json").read_text()


def test_the_reference_names_every_key_and_no_other(sluice, checkout):
    """docs/policy.md has a table row for each key, with the default that the schema has."""
    rows = dict(
        re.findall(
            r"^\| `([\w\[\].]+)` \| [^|]* \| ([^|]*?) \|",
            (checkout / "docs" / "policy.md").read_text(),
            re.MULTILINE,
        )
    )
    expected = {}

    def collect(entry, path):
        for name, inner in entry["properties"].items():
            full = f"{path}.{name}" if path else name
            if "properties" in inner:
                collect(inner, full)
            elif "properties" in inner.get("items", {}):
                collect(inner["items"], full + "[]")
            else:
                required = name in entry.get("required", [])
                default = inner.get("default")
                if required:
                    expected[full] = "required"
                elif default is None:
                    expected[full] = "none"
                else:
                    text = default if isinstance(default, str) else json.dumps(default)
                    expected[full] = f"`{text}`"

    collect(json.loads(call(sluice, "policy", "schema").stdout), "")
    assert rows == expected


def policies_of_the_project(checkout: Path) -> list[Path]:
    """The examples, and the code blocks of the reference."""
    return sorted((checkout / "examples").rglob("*policy*.yaml"))


def blocks_of_the_reference(checkout: Path) -> list[str]:
    text = (checkout / "docs" / "policy.md").read_text()
    return [
        block
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if block.startswith("version:")
    ]


def test_policies_of_examples_and_reference_are_valid(sluice, checkout, tmp_path):
    files = policies_of_the_project(checkout)
    files += [written(tmp_path, block) for block in blocks_of_the_reference(checkout)]
    assert files
    for file in files:
        done = call(sluice, "policy", "check", file)
        assert done.returncode == 0, done.stderr


def test_an_independent_validator_agrees_about_the_schema(sluice, checkout):
    schema = json.loads(call(sluice, "policy", "schema").stdout)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    valid = [VALID, *blocks_of_the_reference(checkout)]
    valid += [file.read_text() for file in policies_of_the_project(checkout)]
    for text in valid:
        validator.validate(yaml.safe_load(text))
    assert not validator.is_valid(yaml.safe_load(WRONG))


def test_host_copies_that_this_machine_cannot_have_are_a_mistake(sluice, tmp_path):
    file = written(tmp_path, VALID + "host_copies: {memory: 100TiB}\n")
    done = call(sluice, "policy", "check", file)
    assert done.returncode == 1
    assert re.search(r"host_copies\.memory: host copies are to have 100 TiB, but of the [\d.]+ [GT]iB that there are", done.stderr)
    assert re.search(r"ask for \d+MiB at most", done.stderr)
    assert call(sluice, "policy", "check", written(tmp_path, VALID + "host_copies: {memory: 64MiB}\n")).returncode == 0


def test_a_disk_for_host_copies_that_will_not_do_is_a_mistake_with_its_place(sluice, tmp_path, disk_folder):
    (tmp_path / "file").touch()
    for disk, place, complaint in [
        ("1GiB, disk_path: none", "disk_path", "there is no folder "),
        ("1GiB, disk_path: file", "disk_path", "is not a folder"),
        ("1GiB", "disk", "needs host_copies.disk_path"),
        (f"1000TiB, disk_path: {disk_folder}", "disk", "of which 256 MiB stay free"),
        (f"0, disk_path: {disk_folder}", "disk_path", "has no meaning without host_copies.disk"),
    ]:
        file = written(tmp_path, VALID + f"host_copies: {{memory: 64MiB, disk: {disk}}}\n")
        done = call(sluice, "policy", "check", file)
        assert done.returncode == 1
        line = VALID.count("\n") + 1
        assert re.search(rf":{line}:\d+: host_copies\.{place}: .*{complaint}", done.stderr), done.stderr
    file = written(tmp_path, VALID + f"host_copies: {{memory: 64MiB, disk: 64MiB, disk_path: {disk_folder}}}\n")
    assert call(sluice, "policy", "check", file).returncode == 0
    file = written(tmp_path, VALID + f"host_copies: {{disk: 64MiB, disk_path: {disk_folder}}}\n")
    assert "needs host_copies.memory, which is used first" in call(sluice, "policy", "check", file).stderr
    file = written(tmp_path, VALID + f"host_copies: {{memory: 64MiB, disk: 1MiB, disk_path: {disk_folder}}}\n")
    assert "host_copies.disk is 1MiB, less than one chunk of 2MiB" in call(sluice, "policy", "check", file).stderr


def test_host_copies_of_less_than_a_chunk_are_a_mistake_whoever_says_its_size(sluice, tmp_path):
    file = written(tmp_path, VALID + "pool: {backend: cuda}\nhost_copies: {memory: 32MiB}\n")
    done = call(sluice, "policy", "check", file)
    assert done.returncode == 1
    assert "host_copies.memory is 32MiB, less than one chunk of 64MiB" in done.stderr
