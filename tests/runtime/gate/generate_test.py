"""The generator's own rules, on small headers: what it must understand, and what it must refuse."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "runtime" / "gate"))

import cuda_header  # noqa: E402
import generate  # noqa: E402

HEADER = """
#if defined(__CUDA_API_VERSION_INTERNAL) || defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
    #define __CUDA_API_PTSZ(api) api ## _ptsz
#else
    #define __CUDA_API_PTSZ(api) api
#endif
#define cuMemcpyHtoDAsync  __CUDA_API_PTSZ(cuMemcpyHtoDAsync_v2)  /* cuNotThis(int) */
#if defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
    #define cuLaunchKernel  __CUDA_API_PTSZ(cuLaunchKernel)
#endif
#ifdef _WIN32
CUresult CUDAAPI cuOnlyOnWindows(void);
#endif
typedef void (CUDA_CB *CUcallback)(int);
CUresult CUDAAPI cuInit(unsigned int Flags);
__CUDA_DEPRECATED CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src,
                                                     size_t n, CUstream hStream);
CUresult CUDAAPI cuLaunchKernel(CUfunction f, CUstream hStream);
CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f);
const char * CUDAAPI cuDescribe(void);
#if defined(__CUDA_API_VERSION_INTERNAL)
    #undef cuMemcpyHtoDAsync
    CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr_v1 dst, const void *src, unsigned int n, CUstream hStream);
    #undef cuLaunchKernel
    CUresult CUDAAPI cuLaunchKernel(CUfunction f, CUstream hStream);
#endif
"""


class Generator(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.headers = pathlib.Path(self.folder.name)

    def read(self, text):
        (self.headers / "cuda.h").write_text(text)
        return cuda_header.read_entry_points(self.headers / "cuda.h")

    def generate(self, text):
        (self.headers / "cuda.h").write_text(text)
        generate.generate(self.headers, self.headers / "out")
        return {name.name: name.read_text() for name in (self.headers / "out").iterdir()}

    def test_what_the_host_reads_at_once_is_never_dropped(self):
        def dropped(base):
            return generate.DROPPABLE.fullmatch(base) is not None

        self.assertTrue(all(map(dropped, ("cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuMemsetD8Async",
                                          "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync"))))
        self.assertFalse(any(map(dropped, ("cuMemcpyDtoHAsync", "cuMemcpyDtoH", "cuMemcpyAsync", "cuMemcpyHtoD",
                                           "cuLaunchHostFunc", "cuStreamWriteValue32", "cuStreamBeginCapture"))))

    def test_every_variant_behind_macros_is_found(self):
        self.assertEqual(
            sorted(self.read(HEADER)),
            ["cuDescribe", "cuInit", "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernel_ptsz",
             "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2_ptsz"],
        )  # fmt: skip

    def test_each_variant_has_its_own_parameters(self):
        found = self.read(HEADER)
        types = {name: [p.type for p in found[name].parameters()] for name in found}
        self.assertEqual(types["cuMemcpyHtoDAsync"][0], "CUdeviceptr_v1")
        self.assertEqual(types["cuMemcpyHtoDAsync_v2_ptsz"], ["CUdeviceptr", "const void *", "size_t", "CUstream"])
        self.assertEqual(found["cuDescribe"].returns, "const char *")

    def wrapper(self, name):
        wrappers = self.generate(HEADER)["gated_calls.cpp"]
        return wrappers[wrappers.index(f"CUresult {name}(") :].split("\n}\n")[0]

    def test_wrappers_name_the_stream_of_the_call(self):
        self.assertIn("stream_use{hStream, true}", self.wrapper("cuMemcpyHtoDAsync_v2_ptsz"))
        self.assertIn("stream_use{hStream, false}", self.wrapper("cuMemcpyHtoDAsync_v2"))

    def test_wrappers_name_what_a_calls_duration_follows_from(self):
        self.assertIn("work_part(n)})", self.wrapper("cuMemcpyHtoDAsync_v2"))
        self.assertNotIn("work_part(src)", self.wrapper("cuMemcpyHtoDAsync_v2"))

    def test_kernels_are_copied_by_hand_and_what_is_all_values_by_rule(self):
        more = "CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr d, unsigned char uc, size_t n, CUstream hStream);\n"
        files = self.generate(HEADER + more)
        self.assertNotIn("CUresult cuLaunchKernel(", files["gated_calls.cpp"])
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuLaunchKernel, deferred)", files["driver_symbols.inc"])
        self.assertIn("queue.push(self, work, any_kind, submit)", files["gated_calls.cpp"])
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuMemsetD8Async, deferred)", files["driver_symbols.inc"])
        self.assertNotIn("is_pinned", files["gated_calls.cpp"].split("cuMemsetD8Async(")[1].split("\n}\n")[0])

    def test_copies_from_the_host_are_left_only_if_its_memory_is_pinned(self):
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuMemcpyHtoDAsync_v2, deferred)", self.generate(HEADER)["driver_symbols.inc"])
        self.assertIn("return driver::is_pinned(src) && queue.push(", self.wrapper("cuMemcpyHtoDAsync_v2"))

    def test_what_makes_graphs_of_graphs_is_noted_in_every_variant(self):
        more = ("CUresult CUDAAPI cuGraphClone(CUgraph *out, CUgraph of);\n"
                "CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph of, unsigned long long flags);\n"
                "CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *n, CUgraph to, size_t count, CUgraphNodeParams *what);\n"
                "CUresult CUDAAPI cuGraphDestroy(CUgraph gone);\n")  # fmt: skip
        files = self.generate(HEADER + more)
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuGraphClone, carries)", files["driver_symbols.inc"])
        self.assertIn("graph_is_copy(*out, of);", files["gated_calls.cpp"])
        self.assertIn("executable_is_of(*out, of);", files["gated_calls.cpp"])
        self.assertIn("graph_gets_node(to, what);", files["gated_calls.cpp"])
        # What ends a graph waits for launches that were left, and what it held is forgotten before its handle is free.
        destroy = files["gated_calls.cpp"].split("cuGraphDestroy(CUgraph gone)")[1]
        self.assertLess(destroy.index("flush_if_deferring"), destroy.index("graph_goes(gone)"))
        self.assertLess(destroy.index("graph_goes(gone)"), destroy.index("real<"))
        self.assertNotIn("flush_if_deferring", files["gated_calls.cpp"].split("cuGraphClone(")[1].split("\n}\n")[0])

    def test_what_is_not_known_to_be_beside_the_queue_waits_for_it(self):
        symbols = self.generate(HEADER + "CUresult CUDAAPI cuStreamForsake(CUstream s);\n")["driver_symbols.inc"]
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuStreamForsake, drains)", symbols)

    def test_an_unknown_launch_stops_the_build(self):
        for name in ("cuLaunchWarp", "cuGraphLaunchLater", "cuStreamMemsetSomething"):
            with self.assertRaisesRegex(cuda_header.HeaderError, f"{name} looks like a launch"):
                self.generate(HEADER + f"CUresult CUDAAPI {name}(CUstream hStream);\n")

    def test_a_new_copy_is_gated_by_rule(self):
        symbols = self.generate(HEADER + "CUresult CUDAAPI cuMemcpy4DAsync(CUstream s);\n")["driver_symbols.inc"]
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuMemcpy4DAsync, gated)", symbols)

    def test_describing_a_launch_in_a_graph_is_not_one(self):
        symbols = self.generate(HEADER + "CUresult CUDAAPI cuGraphAddMemsetNode(int a);\n")["driver_symbols.inc"]
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuGraphAddMemsetNode, asks)", symbols)

    def test_what_names_memory_keeps_it_there_until_it_has_been_called(self):
        more = ("CUresult CUDAAPI cuTensorMapEncodeTiled(void *out, void *address);\n"
                "CUresult CUDAAPI cuGraphExecMemcpyNodeSetParams(CUgraphExec e, CUgraphNode n);\n"
                "CUresult CUDAAPI cuGraphInstantiate_v3(CUgraphExec *out, CUgraph of);\n"
                "CUresult CUDAAPI cuGraphDestroy(CUgraph gone);\n")  # fmt: skip
        files = self.generate(HEADER + more)
        for name, flushes in (("cuTensorMapEncodeTiled", False), ("cuGraphExecMemcpyNodeSetParams", True),
                              ("cuGraphInstantiate_v3", True)):
            body = files["gated_calls.cpp"].split(f"CUresult {name}(")[1].split("\n}\n")[0]
            self.assertLess(body.index(f"memory_stays const there{{symbol::of_{name}}};"), body.index("real<"))
            self.assertEqual("flush_if_deferring" in body, flushes, name)
            if flushes:  # who is inside waits for nobody
                self.assertLess(body.index("flush_if_deferring"), body.index("memory_stays"))
        self.assertIn("SLUICE_DRIVER_SYMBOL(cuTensorMapEncodeTiled, asks)", files["driver_symbols.inc"])
        self.assertNotIn("memory_stays", files["gated_calls.cpp"].split("cuGraphDestroy(")[1].split("\n}\n")[0])

    def test_a_gated_call_must_return_a_result(self):
        with self.assertRaisesRegex(cuda_header.HeaderError, "cuMemcpyQuietly returns 'void'"):
            self.generate(HEADER + "void CUDAAPI cuMemcpyQuietly(CUstream s);\n")

    def test_two_meanings_of_one_symbol_are_refused(self):
        with self.assertRaisesRegex(cuda_header.HeaderError, "declared twice"):
            self.read(HEADER + "CUresult CUDAAPI cuInit(int a, int b);\n")

    def test_where_blanks_are_makes_no_difference(self):
        self.read(HEADER + "CUresult CUDAAPI cuGet(int *a, char ** b);\n#undef x\nCUresult CUDAAPI cuGet(int* a, char **b);\n")

    def test_another_header_is_refused_with_a_message(self):
        (self.headers / "cuda.h").write_text("int main(void);\n")
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            sys.argv = ["generate.py", "--headers", str(self.headers), "--output", str(self.headers / "out")]
            self.assertEqual(generate.main(), 1)
        self.assertIn("does not declare cuLaunchKernel", said.getvalue())


if __name__ == "__main__":
    unittest.main()
