"""Lint finds the functions that nobody calls, and nothing else."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import lint  # noqa: E402
from detail import callers  # noqa: E402


def uncalled(**sources: str) -> set[str]:
    """Of sources by their names, which have one dot as `_`."""
    files = [(name.replace("_", "."), text) for name, text in sources.items()]
    return set(callers.look_at(files).uncalled())


def test_a_function_that_is_only_declared_and_defined_is_found(tmp_path):
    (tmp_path / "memhandover").mkdir()
    (tmp_path / "tests").mkdir()
    header, source, test = (tmp_path / name for name in ("memhandover/a.hpp", "memhandover/a.cpp", "tests/a_test.cpp"))
    header.write_text("namespace sluice {\n/// left() does it.\nint left(int count);\nint used();\n}\n")
    source.write_text("namespace sluice {\nint left(int count) {\n  return left(count - 1);\n}\nint used() { return 1; }\n"
                      "int const once = used();\n}\n")
    test.write_text("TEST(left, is_called) { left(1); }\n")
    assert callers.check(tmp_path, [header, source, test], {}) == [
        "memhandover/a.cpp:2: nobody calls left", "memhandover/a.hpp:3: nobody calls left"]
    assert callers.check(tmp_path, [header, source], {"lef*": "for once"}) == []
    assert callers.check(tmp_path, [header, source], {"left": "", "used": ""}) == ["used needs no exception any more"]


@pytest.mark.parametrize("caller", [
    "int x() { return f(1) + x(); }", "struct x { int y = f(1); };", "struct x { x() : y_{f(1)}, z_(0) {} int y_, z_; };",
    "bool const y = true && f(1);", "auto* const y = &f;", "void x() { each(all, f); }", "void x(int y = f(1));",
    "#define CALL(x) \\\n  f(x)", "void x() { one::two::f(3); }", "int y = a < 2 ? f(1) : 0;", "auto y = [] { return !f(1); };",
    "using y = decltype(&f);", "template <typename T>\nvoid x(T t) requires (f(t)) {}",
])
def test_a_call_is_seen(caller):
    assert "f" not in uncalled(a_hpp="int f(int n);", a_cpp=caller)


@pytest.mark.parametrize("other", [
    "void x(int f, long y = 1) { y = f; }", "int x() { int f = 1; return f; }", "void x() { log(\"f(1)\"); }  // f(1)",
    "/* f(1) */ int f(int n) { return f(n - 1); }", "void x(pool& p) { p.f(1); }", "void x(pool* p) { p->f(1); }",
    "auto y = R\"(f(1))\";", "char const* y = \"f\";", "void x() { std::string f(1, '\"'); }",
])
def test_what_only_looks_like_a_call_is_none(other):
    assert "f" in uncalled(a_hpp="int f(int n);", a_cpp=other)


def test_a_method_may_be_called_of_an_object():
    pool = "class pool : base {\n public:\n  explicit pool(int n);\n  ~pool();\n  [[nodiscard]] bool f(int n) const noexcept;\n};"
    assert uncalled(a_hpp=pool, a_cpp="pool::pool(int n) {}\npool::~pool() = default;") == {"f"}
    assert uncalled(a_hpp=pool, a_cpp="bool pool::f(int n) const noexcept { return n > 0; }") == {"f"}
    assert uncalled(a_hpp=pool, a_cpp="bool x{pool{1}.f(2)};") == set()


def test_who_calls_may_not_be_cpp():
    function = {"a_cpp": 'extern "C" int sluice_f(int n) { return n; }'}
    assert uncalled(**function) == {"sluice_f"}
    assert uncalled(**function, b_cpp='auto* const y = ::dlsym(library, "sluice_f");') == set()
    assert uncalled(**function, b_S="  call sluice_f\n") == set()
    assert uncalled(**function, b_py='NAMES = {"sluice_f": None}\n') == set()
    assert uncalled(**function, b_py='print(library.sluice_f(1))\n') == set()
    assert uncalled(**function, b_py='def f():\n    """Calls sluice_f(1)."""\n') == {"sluice_f"}


def test_what_a_library_or_the_loader_calls_is_not_looked_at():
    assert uncalled(a_cpp="struct x : y { void f() override; };\n[[gnu::constructor]] void g() {}\nbool operator<(x, x);") == set()
    assert uncalled(a_hpp="struct y { virtual void f() = 0; };", a_cpp="struct x : y { void f() override; };") == {"f"}


def test_everything_in_the_product_has_a_caller():
    clean, said = lint.check_callers()
    assert clean, said
