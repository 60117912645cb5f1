"""Generates the part of the gate that follows from cuda.h: jump stubs, typed wrappers, table of symbols.

Every entry point gets one of nine classes, by rule from its name, so that a newer header needs no list to be kept:

    deferred  puts work on the device and may be left to the submitter: passes through the gate, now or later
    gated     puts work on the device: waits for what was left to the submitter, then passes through the gate
    special   written by hand, because the gate has something to say there (memory, cuGetProcAddress, ...)
    ordered   events, and streams that are waited for or asked: written by hand, for while something is left to the
              submitter, and takes its turn there; else one jump to the driver
    refused   answers CUDA_ERROR_NOT_SUPPORTED: the gate could not hold it
    carries   makes, changes or ends a graph: what the graph holds that needs agreement goes with it
    asks      names memory of the device, which the driver looks up, or takes it for what is launched later: waits until it
              is there, and while it is about to go
    passed    neither sees nor changes what was left to the submitter: one jump to the driver
    drains    everything else: waits for what was left to the submitter, then jumps to the driver

A name that looks like a launch and fits no rule stops the build: it must be classified before it can slip through.

    python3 generate.py --headers DIRECTORY-OF-CUDA_H --output DIRECTORY
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

from cuda_header import EntryPoint, HeaderError, read_entry_points

GATED = tuple(
    re.compile(pattern)
    for pattern in (
        r"cuLaunch(Kernel|KernelEx|CooperativeKernel|Grid|GridAsync|HostFunc)?",
        r"cuGraphLaunch",
        r"cuMem(cpy|set)\w+|cuMemcpy",
        r"cuStream((Write|Wait)Value(32|64)|BatchMemOp|AddCallback)",
        r"cu(Signal|Wait)ExternalSemaphoresAsync|cuGraphUpload|cuMemMapArrayAsync",
        r"cuStreamBeginCapture(ToGraph)?",  # so that a closed gate never meets a capture that is just beginning
        r"cuMem(Prefetch|Discard|BatchDecompress)\w*",
    )
)
# All that there is to these calls is in their parameters, which can be kept.
DEFERRED = re.compile(r"cuLaunch(Kernel|KernelEx|CooperativeKernel)|cuGraphLaunch|cuMemset\w+Async|cuMemcpy(DtoD|HtoD)Async")
# From memory of the host only if it is pinned: whoever has such a copy made leaves it as it is until that is done.
FROM_HOST = re.compile(r"cuMemcpyHtoDAsync")
# Of kernels some parameters lie elsewhere, and are copied by hand; some graphs need agreement.
WRITTEN_BY_HAND = re.compile(r"cuLaunch(Kernel|KernelEx|CooperativeKernel)|cuGraphLaunch")
# Creates, describes, looks up or enters; work that has been accepted but not submitted makes no difference to it.
PASSED = re.compile(
    r"cu\w*Get(?!Proc)\w*|cuInit|cuDriverGetVersion|cuDevice(CanAccessPeer|ComputeCapability|PrimaryCtxRetain)"
    r"|cuCtx(Create|Attach|PushCurrent|PopCurrent|SetCurrent|FromGreenCtx|EnablePeerAccess)|cuThreadExchangeStreamCaptureMode"
    r"|cu(Stream|Event)Create(WithPriority)?|cuStreamIsCapturing|cuFunc(IsLoaded|Load)|cuModule(Load\w*|EnumerateFunctions)"
    r"|cuLibrary(Load\w+|EnumerateKernels)|cuLink\w+|cuOccupancy\w+|cuTensorMap\w+|cuLogs\w+|cuProfilerInitialize"
    r"|cuMem(AllocHost|AllocManaged|HostAlloc|HostRegister)"
    r"|cu(Func|Kernel|Ctx)Set(CacheConfig|SharedMemConfig)"  # preferences
    r"|cuMem(ImportFromShareableHandle|PoolCreate)"
    r"|cuGraph(Create|Clone|DebugDotPrint|Add\w+|NodeFindInClone)|cuMulticast(Create|AddDevice)"
)
# What a discarded micro-batch may leave undone: nobody on the host sees the result before the discard.
DROPPABLE = DEFERRED
# What is noted of graphs, with the call's parameters by their place: before it is made, since the driver may give a handle
# out again at once, or when it has succeeded.
CARRIES_BEFORE = {"cuGraphDestroy": "graph_goes({0})", "cuGraphExecDestroy": "executable_goes({0})"}
CARRIES_AFTER = {
    "cuGraphCreate": "graph_is_new(*{0})",
    "cuGraphClone": "graph_is_copy(*{0}, {1})",
    "cuGraphAddChildGraphNode": "graph_gets_child({1}, {4})",
    "cuGraphAddNode": "graph_gets_node({1}, {last})",
    "cuGraphInstantiate": "executable_is_of(*{0}, {1})",
    "cuGraphInstantiateWithFlags": "executable_is_of(*{0}, {1})",
    "cuGraphInstantiateWithParams": "executable_is_of(*{0}, {1})",
    "cuGraphExecUpdate": "executable_is_of({0}, {1})",
}
REFUSED = frozenset({"cuLaunchCooperativeKernelMultiDevice"})
# The driver looks up the addresses that these are given or that lie in a graph, and refuses what has no memory behind it.
# Those that carry are among them. What lies outside of the pool never goes, so that modules, arrays and pools of the
# driver's are not meant.
ASKS = re.compile(
    r"cuGraph(Add\w*Node|Instantiate\w*|(Exec)?\w*NodeSetParams|ExecUpdate|KernelNodeSetAttribute)"
    r"|cuStreamSetAttribute|cuTexObjectCreate|cuTexRefSetAddress(2D)?|cuTensorMap\w+|cuMemGetAccess|cuMemRangeGetAttributes?"
)
SPECIAL = frozenset({
    "cuInit", "cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuGetProcAddress_v2",
    "cuMemAlloc_v2", "cuMemAllocPitch_v2", "cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz", "cuMemGetInfo_v2", "cuMemGetAddressRange_v2",
    "cuDeviceTotalMem_v2", "cuPointerGetAttribute", "cuPointerGetAttributes", "cuPointerSetAttribute",
    "cuMemAllocAsync", "cuMemAllocAsync_ptsz", "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz",
    "cuIpcGetMemHandle", "cuMemRetainAllocationHandle", "cuMemGetHandleForAddressRange", "cuMulticastBindAddr",
    "cuMemCreate", "cuMemRelease", "cuMemExportToShareableHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMulticastBindMem",
    "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemAddressReserve", "cuMemAddressFree", "cuModuleUnload", "cuLibraryUnload", "cuFuncSetAttribute", "cuKernelSetAttribute",
    "cuStreamEndCapture", "cuStreamEndCapture_ptsz", "cuStreamDestroy", "cuStreamDestroy_v2", "cuCtxDestroy", "cuCtxDestroy_v2",
    "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxReset_v2",
})  # fmt: skip
ORDERED = frozenset({
    "cuCtxSynchronize", "cuCtxSynchronize_v2",
    "cuEventRecord", "cuEventRecord_ptsz", "cuEventRecordWithFlags", "cuEventRecordWithFlags_ptsz", "cuEventQuery",
    "cuEventSynchronize", "cuEventDestroy", "cuEventDestroy_v2", "cuEventElapsedTime", "cuEventElapsedTime_v2",
    "cuStreamWaitEvent", "cuStreamWaitEvent_ptsz", "cuStreamSynchronize", "cuStreamSynchronize_ptsz",
    "cuStreamQuery", "cuStreamQuery_ptsz",
})  # fmt: skip
# Words that mark a launch, unless the name also says that it only describes one (a graph's node).
LAUNCH_WORDS = ("Launch", "Memcpy", "Memset")
DESCRIBING_WORDS = ("Node",)

# Exported by every driver, declared in a header that CUDA's wheels leave out.
WITHOUT_HEADER = ("cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop")
COMPANIONS = ("cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")

NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED


def classify(entry: EntryPoint) -> str:
    """The class of one entry point.

    Raises:
        HeaderError: It looks like a launch and fits no rule, or the gate cannot wrap it.
    """
    if entry.name in SPECIAL:
        return "special"
    if entry.name in ORDERED:
        return "ordered"
    if entry.base in REFUSED:
        return "refused"
    if entry.base in CARRIES_BEFORE or entry.base in CARRIES_AFTER:
        return "carries"
    if ASKS.fullmatch(entry.base):
        return "asks"
    if any(pattern.fullmatch(entry.base) for pattern in GATED):
        if entry.returns != "CUresult":
            raise HeaderError(f"{entry.name} returns '{entry.returns}': the gate can only hold calls returning CUresult")
        return "deferred" if DEFERRED.fullmatch(entry.base) else "gated"
    looks_like_launch = any(word in entry.base for word in LAUNCH_WORDS)
    if looks_like_launch and not any(word in entry.base for word in DESCRIBING_WORDS):
        raise HeaderError(
            f"{entry.name} looks like a launch, but no rule says what to do with it. Add it to GATED, REFUSED or"
            " DESCRIBING_WORDS in runtime/gate/generate.py; until then launches could pass the gate unseen"
        )
    return "passed" if PASSED.fullmatch(entry.base) else "drains"


def stream_of(entry: EntryPoint) -> str:
    """A C++ expression for the stream that a gated call works on."""
    default = "true" if entry.per_thread else "false"
    for parameter in entry.parameters():
        if parameter.type == "CUstream":
            return f"stream_use{{{parameter.name}, {default}}}"
        if parameter.type.replace("const", "").split() in (["CUlaunchConfig", "*"], ["CUlaunchConfig*"]):
            name = parameter.name
            return f"stream_use{{{name} != nullptr ? {name}->hStream : nullptr, {default}}}"
    return f"stream_use{{nullptr, {default}}}"


#: What tells how long a call takes: the function or graph, its dimensions, the bytes; not what it works on.
KIND_TYPES = ("CUfunction", "CUgraphExec", "size_t", "unsigned int", "CUlaunchConfig *")


def kind_of(entry: EntryPoint) -> str:
    """The C++ expressions that make up the kind of work that a gated call puts on the device."""
    parts = [f"work_part(symbol::of_{entry.name})"]
    for parameter in entry.parameters():
        plain = " ".join(parameter.type.replace("const", "").replace("*", " *").split())
        if plain in KIND_TYPES:
            parts.append(f"work_part({parameter.name})")
    return ", ".join(parts)


def bytes_of(entry: EntryPoint) -> str:
    """A C++ expression for how much a gated call copies, 0 if it does not say that in one number."""
    return "ByteCount" if any(p.name == "ByteCount" for p in entry.parameters()) else "0"


def droppable(entry: EntryPoint) -> str:
    """A C++ expression for whether an aborted micro-batch's call is dropped (else it is refused)."""
    return "true" if DROPPABLE.fullmatch(entry.base) else "false"


def wrapper(entry: EntryPoint) -> str:
    """The C++ definition that answers for one gated entry point."""
    parameters = entry.parameters()
    declared = ", ".join(f"{p.type} {p.name}" for p in parameters)
    types = ", ".join(p.type for p in parameters)
    names = ", ".join(p.name for p in parameters)
    begin = f"""SLUICE_DRIVER_CALL CUresult {entry.name}({declared}) {{
  using driver_function = CUresult (*)({types});
  planned_work const work{{{stream_of(entry)}, the_gate().bounded() ? key_of_work({{{kind_of(entry)}}}) : 0,
                          {{symbol::of_{entry.name}, nullptr, {bytes_of(entry)}}}}};
  gated_call const call{{symbol::of_{entry.name}, work, {droppable(entry)}}};
"""
    submit = f"{{ return real<driver_function>(symbol::of_{entry.name})({names}); }}"
    if DEFERRED.fullmatch(entry.base):
        condition = f"driver::is_pinned({parameters[1].name}) && " if FROM_HOST.fullmatch(entry.base) else ""
        return begin + f"""  auto const submit = [=] {submit};
  return dispatch_or_defer(call, any_kind, submit, [&](submission_queue& queue, thread_slot const& self) {{
    return {condition}queue.push(self, work, any_kind, submit);
  }});
}}
"""
    if entry.base.startswith("cuStreamBeginCapture"):
        into_new = "false" if entry.base.endswith("ToGraph") else "true"
        return begin + f"""  CUresult const result = dispatch(call, [&] {submit});
  if (result == CUDA_SUCCESS) {{
    note_capture({stream_of(entry)}, {into_new});
  }}
  return result;
}}
"""
    return begin + f"  return dispatch(call, [&] {submit});\n}}\n"


def carrier(entry: EntryPoint) -> str:
    """The C++ definition that answers for one entry point that makes, changes or ends a graph, or names memory."""
    parameters = entry.parameters()
    declared = ", ".join(f"{p.type} {p.name}" for p in parameters)
    types = ", ".join(p.type for p in parameters)
    names = [p.name for p in parameters]

    def noted(rules: dict[str, str]) -> str:
        return f"  {rules[entry.base].format(*names, last=names[-1])};\n"

    flush = "" if PASSED.fullmatch(entry.base) else f"  flush_if_deferring(symbol::of_{entry.name});\n"
    before = noted(CARRIES_BEFORE) if entry.base in CARRIES_BEFORE else ""
    after = f"  if (result == CUDA_SUCCESS) {{\n  {noted(CARRIES_AFTER)}  }}\n" if entry.base in CARRIES_AFTER else ""
    asks = f"  memory_stays const there{{symbol::of_{entry.name}}};\n" if ASKS.fullmatch(entry.base) else ""
    return f"""SLUICE_DRIVER_CALL CUresult {entry.name}({declared}) {{
{flush}{asks}{before}  CUresult const result = real<CUresult (*)({types})>(symbol::of_{entry.name})({", ".join(names)});
{after}  return result;
}}
"""


def stubs(classes: dict[str, str]) -> str:
    """Assembly for x86-64: the exported jumps, and the table they jump through.

    Each slot first points to code that opens the driver, fills the table and jumps again, so a process that never
    calls CUDA never opens the driver.
    """
    out = [".text"]
    for index, (name, kind) in enumerate(classes.items()):
        jump = f"  jmp *sluice_driver_table+{8 * index}(%rip)"
        bodies = {
            "passed": jump,
            "refused": f"  mov ${NOT_SUPPORTED}, %eax\n  ret",
            "drains": f"  cmpl $0, sluice_gate_defers(%rip)\n  jne 1f\n{jump}\n1: push ${index}\n  jmp sluice_drain",
            "ordered": f"  cmpl $0, sluice_gate_defers(%rip)\n  jne 1f\n{jump}\n1: jmp {name}_in_turn",
        }
        if kind in bodies:
            out.append(f".globl {name}\n.type {name}, @function\n.p2align 4\n{name}:\n{bodies[kind]}\n.size {name}, .-{name}")
    # The index of the function lies on the stack; what is called gets it as well.
    for label, call in (("sluice_first_call", "sluice_fill_driver_table"), ("sluice_drain", "sluice_flush_submissions")):
        out += jump_after(label, call)
    out.append(f".globl sluice_missing\n.hidden sluice_missing\nsluice_missing:\n  mov ${NOT_FOUND}, %eax\n  ret")
    for index in range(len(classes)):
        out.append(f"sluice_first_{index}:\n  push ${index}\n  jmp sluice_first_call")
    out.append(".data\n.p2align 6")
    out.append(".globl sluice_driver_table\n.hidden sluice_driver_table\nsluice_driver_table:")
    out += [f"  .quad sluice_first_{index}" for index in range(len(classes))]
    out.append('.section .data.rel.ro,"aw"\n.p2align 3')
    out.append(".globl sluice_own_table\n.hidden sluice_own_table\nsluice_own_table:")
    out += [f"  .quad {name}" for name in classes]
    out.append('.section .note.GNU-stack,"",@progbits')
    return "\n".join(out) + "\n"


def jump_after(label: str, call: str) -> list[str]:
    """Assembly that calls a function with the index that lies on the stack, then jumps to the entry point of that index."""
    out = [f".p2align 4\n{label}:"]
    saved = ("rdi", "rsi", "rdx", "rcx", "r8", "r9", "rax")
    # On entry the index lies above the return address: 16 bytes, and 7 registers more leave the stack 8 off.
    out += [f"  push %{register}" for register in saved]
    out.append("  sub $136, %rsp")
    out += [f"  movups %xmm{i}, {16 * i}(%rsp)" for i in range(8)]
    out.append(f"  mov {136 + 8 * len(saved)}(%rsp), %edi")
    out.append(f"  call {call}")
    out += [f"  movups {16 * i}(%rsp), %xmm{i}" for i in range(8)]
    out.append("  add $136, %rsp")
    out += [f"  pop %{register}" for register in reversed(saved)]
    out.append("  pop %r11\n  lea sluice_driver_table(%rip), %r10\n  jmp *(%r10,%r11,8)")
    return out


def symbols(classes: dict[str, str]) -> str:
    """The list of symbols as macro calls, in the order of the tables."""
    def words(values: tuple[str, ...]) -> str:
        return ", ".join(f'"{value}"' for value in values)

    lines = [f"SLUICE_DRIVER_SYMBOL({name}, {kind})" for name, kind in classes.items()]
    guard = "#ifdef SLUICE_DRIVER_SYMBOL\n" + "\n".join(lines) + "\n#undef SLUICE_DRIVER_SYMBOL\n#endif\n"
    return (guard + f"#ifdef SLUICE_LAUNCH_WORDS\nSLUICE_LAUNCH_WORDS({words(LAUNCH_WORDS)})\n"
            "#undef SLUICE_LAUNCH_WORDS\n#endif\n"
            f"#ifdef SLUICE_DESCRIBING_WORDS\nSLUICE_DESCRIBING_WORDS({words(DESCRIBING_WORDS)})\n"
            "#undef SLUICE_DESCRIBING_WORDS\n#endif\n")  # fmt: skip


def wrappers(entries: list[EntryPoint]) -> str:
    """The C++ file with all gated calls, those that carry and those that ask.

    driver.hpp includes cuda.h with every variant declared, so the compiler compares each signature with the header's.
    """
    return ("#include \"runtime/gate/agreed_graphs.hpp\"\n#include \"runtime/gate/dispatch.hpp\"\n"
            "#include \"runtime/gate/driver_calls.hpp\"\n\n"
            "#pragma GCC diagnostic ignored \"-Wdeprecated-declarations\"\n\n"
            "using namespace sluice::gate;  // NOLINT\n\n" + "\n".join(carrier(entry) if classify(entry) in ("carries", "asks") else wrapper(entry) for entry in entries))  # fmt: skip


def read_driver(headers: pathlib.Path) -> dict[str, EntryPoint]:
    """Every entry point of the driver that the headers in a directory tell of, by symbol name, sorted."""
    entries = read_entry_points(headers / "cuda.h")
    for companion in COMPANIONS:
        if (headers / companion).exists():
            entries = read_entry_points(headers / companion) | entries
    extra = {name: EntryPoint(name, "CUresult", "") for name in WITHOUT_HEADER}
    return dict(sorted((extra | entries).items()))


def generate(headers: pathlib.Path, output: pathlib.Path) -> None:
    """Writes driver_stubs.S, driver_symbols.inc and gated_calls.cpp.

    Raises:
        HeaderError: The header holds something that must not be passed over.
    """
    entries = read_driver(headers)
    if "cuLaunchKernel" not in entries:
        raise HeaderError(f"{headers / 'cuda.h'} does not declare cuLaunchKernel: it is not the CUDA driver's header")
    classes = {name: classify(entry) for name, entry in entries.items()}
    classes |= {name: kind for kind, names in (("special", SPECIAL), ("ordered", ORDERED)) for name in names if name not in classes}
    classes = dict(sorted(classes.items()))
    output.mkdir(parents=True, exist_ok=True)
    by_hand = [name for name in classes if name in entries and WRITTEN_BY_HAND.fullmatch(entries[name].base)]
    gated = [entries[name] for name, kind in classes.items() if kind in ("gated", "deferred", "carries", "asks") and name not in by_hand]
    (output / "driver_stubs.S").write_text(stubs(classes))
    (output / "driver_symbols.inc").write_text(symbols(classes))
    (output / "gated_calls.cpp").write_text(wrappers(gated))


def main() -> int:
    """Runs the generator; the exit status is 0, or 1 after a message."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--headers", type=pathlib.Path, required=True, help="directory that holds cuda.h")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="directory to write to")
    arguments = parser.parse_args()
    try:
        generate(arguments.headers, arguments.output)
    except (HeaderError, OSError) as failure:
        print(f"generate.py: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
