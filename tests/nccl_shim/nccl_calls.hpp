/// NCCL's functions that a rank calls, as the fake NCCL has them.
#pragma once

#include <cuda.h>

#include <cstddef>

#include "tests/nccl_shim/fake_nccl.hpp"

struct ncclComm;
extern "C" {
int ncclCommInitRank(ncclComm** made, int ranks, sluice::fake_nccl::unique_id id, int rank);
int ncclCommInitRankConfig(ncclComm** made, int ranks, sluice::fake_nccl::unique_id id, int rank,
                           void* config);
int ncclCommRegister(ncclComm* on, void* buffer, std::size_t bytes, void** handle);
int ncclCommDeregister(ncclComm* on, void* handle);
int ncclCommSplit(ncclComm* parent, int colour, int order, ncclComm** made, void* config);
int ncclCommGetAsyncError(ncclComm* of, int* error);
int ncclCommDestroy(ncclComm* which);
int ncclCommAbort(ncclComm* which);
int ncclGroupStart();
int ncclGroupEnd();
int ncclSend(void const* from, std::size_t count, int type, int peer, ncclComm* on, CUstream where);
int ncclRecv(void* to, std::size_t count, int type, int peer, ncclComm* on, CUstream where);
int ncclAllReduce(void const* from, void* to, std::size_t count, int type, int reduction,
                  ncclComm* on, CUstream where);
}
