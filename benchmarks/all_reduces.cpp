/// All-reduces by NCCL's own call, one after another, as nccl-tests makes them. Loaded by the jobs that all_reduces.py measures.
#include <cstddef>

struct ncclComm;
struct CUstream_st;

namespace {

constexpr int float32 = 7;
constexpr int sum = 0;

using all_reduce = int (*)(void const* from, void* to, std::size_t count, int type, int reduction,
                           ncclComm* on, CUstream_st* where);

}  // namespace

/// Makes that many, in place, of `count` floats, by the process's ncclAllReduce. Returns the first error of NCCL's, or 0.
extern "C" __attribute__((visibility("default"))) int sluice_bench_all_reduces(
    all_reduce make, float* data, std::size_t count, ncclComm* on, CUstream_st* where, int times) {
  for (int i = 0; i < times; ++i) {
    if (int const failed = make(data, data, count, float32, sum, on, where); failed != 0) {
      return failed;
    }
  }
  return 0;
}
