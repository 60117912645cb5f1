"""Generates a weak definition of every driver entry point, and the table of them, for the fake driver.

What the fake driver implements replaces the weak definition; everything else counts the call and answers
CUDA_ERROR_NOT_SUPPORTED (or the failure that a test has asked for). So the fake exports what a real driver exports,
and every symbol has an address of its own.

    python3 generate_stubs.py --gate DIRECTORY-OF-THE-GATE'S-GENERATOR --headers DIRECTORY-OF-CUDA_H --output DIRECTORY
"""

import argparse
import pathlib
import sys


def main() -> None:
    """Writes fake_stubs.S."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for option in ("--gate", "--headers", "--output"):
        parser.add_argument(option, type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.gate))
    import generate  # the gate's own generator: both must agree on what a driver exports

    names = sorted(set(generate.read_driver(arguments.headers)) | generate.SPECIAL)
    out = [".text"]
    for index, name in enumerate(names):
        out.append(f".weak {name}\n.type {name}, @function\n.p2align 4\n{name}:\n  mov ${index}, %edi\n"
                   f"  jmp fake_not_implemented\n.size {name}, .-{name}")  # fmt: skip
    out.append('.section .data.rel.ro,"aw"\n.p2align 3\n.globl fake_symbols\n.hidden fake_symbols\nfake_symbols:')
    for index, name in enumerate(names):
        out.append(f"  .quad fake_name_{index}\n  .quad {name}")
    out.append(f".globl fake_symbol_count\n.hidden fake_symbol_count\nfake_symbol_count:\n  .quad {len(names)}")
    out.append('.section .rodata')
    out += [f'fake_name_{index}: .asciz "{name}"' for index, name in enumerate(names)]
    out.append('.section .note.GNU-stack,"",@progbits')
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "fake_stubs.S").write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
