#!/usr/bin/env python3
"""Says which lines of requirements files the running interpreter does not satisfy, one a line.

It reads installed metadata only: nothing is imported and no network is asked, so it takes a tenth
of a second where `pip install` takes seconds.

    python3 check_requirements.py --accept 'torch>=2.11,<2.12' requirements.txt

`--accept` replaces the files' own line for that package: a range that will do where one version
is pinned. Exit status: 0 all satisfied, 1 something is missing, 2 a line cannot be understood.
"""

import argparse
import re
import sys
from importlib import metadata

CLAUSE = re.compile(r"\s*(==|>=|<=|<|>)\s*([0-9][0-9.]*)\s*,?")
REQUIREMENT = re.compile(rf"([A-Za-z0-9][A-Za-z0-9._-]*)((?:{CLAUSE.pattern})*)\s*")


def canonical(name: str) -> str:
    """The name as package indexes compare it: lower case, one dash for every run of separators."""
    return re.sub(r"[-_.]+", "-", name).lower()


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without local label or trailing zeros: 2.11.0+cu130 → (2, 11)."""
    numbers = [int(n) for n in re.match(r"[0-9]+(?:\.[0-9]+)*", version).group().split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def parse(line: str) -> tuple[str, list[tuple[str, str]]]:
    """Splits `name>=1,<2` into canonical name and clauses. Raises ValueError on anything richer."""
    found = REQUIREMENT.fullmatch(line)
    if not found:
        raise ValueError(f"'{line}' is too rich: use NAME with ==, >=, <=, < or > and numbers")
    return canonical(found.group(1)), CLAUSE.findall(found.group(2))


def lines_of(path: str) -> list[str]:
    """The requirements in a file, without comments, blank lines and options for pip."""
    with open(path, encoding="utf-8") as file:
        stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in file)
        return [line for line in stripped if line and not line.startswith("-")]


def satisfied(name: str, clauses: list[tuple[str, str]]) -> bool:
    """Whether the installed version of `name` meets every clause."""
    try:
        installed = release(metadata.version(name))
    except (metadata.PackageNotFoundError, AttributeError, TypeError):
        return False  # absent, or its metadata were cut off when an installation died
    compare = {
        "==": lambda a, b: a == b,
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    return all(compare[operator](installed, release(version)) for operator, version in clauses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept", action="append", default=[], metavar="REQUIREMENT")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    try:
        accepted = dict(parse(line) for line in arguments.accept)
        missing = []
        for line in (line for path in arguments.files for line in lines_of(path)):
            name, clauses = parse(line)
            if not satisfied(name, accepted.get(name, clauses)):
                missing.append(line)
    except (OSError, ValueError) as problem:
        print(f"check_requirements.py: {problem}", file=sys.stderr)
        return 2
    print("\n".join(missing), end="\n" if missing else "")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
