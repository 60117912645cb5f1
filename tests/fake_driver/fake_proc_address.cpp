/// cuGetProcAddress and the texts of errors.
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "tests/fake_driver/fake_core.hpp"
#include "tests/fake_driver/fake_driver.h"

using namespace sluice::fake;

namespace {

/// The CUDA version from which a caller gets the variant, for those that came after 3.2.
struct variant_version {
  char const* symbol;
  int version;
};
constexpr std::array variant_versions{
    variant_version{"cuGetProcAddress_v2", 12000},
    variant_version{"cuMemPrefetchAsync_v2", 12020},
    variant_version{"cuMemcpyBatchAsync_v2", 13000},
    variant_version{"cuMemcpy3DBatchAsync_v2", 13000},
    variant_version{"cuStreamWriteValue32_v2", 11070},
    variant_version{"cuStreamWaitValue32_v2", 11070},
    variant_version{"cuStreamWriteValue64_v2", 11070},
    variant_version{"cuStreamWaitValue64_v2", 11070},
    variant_version{"cuStreamBatchMemOp_v2", 11070},
    variant_version{"cuStreamBeginCapture_v2", 10010},
    variant_version{"cuDevicePrimaryCtxReset_v2", 11000},
    variant_version{"cuDevicePrimaryCtxRelease_v2", 11000},
    variant_version{"cuCtxCreate_v3", 11040},
    variant_version{"cuCtxCreate_v4", 12050},
    variant_version{"cuEventElapsedTime_v2", 12080},
    variant_version{"cuStreamGetCaptureInfo_v2", 11030},
    variant_version{"cuStreamGetCaptureInfo_v3", 12030},
    variant_version{"cuGraphExecUpdate_v2", 12000},
};

int since(std::string const& symbol) {
  for (variant_version const& one : variant_versions) {
    if (symbol == one.symbol) {
      return one.version;
    }
  }
  return 3020;
}

void* find(std::string const& name, int version, bool per_thread) {
  for (int variant = 4; variant >= 1; --variant) {
    std::string const symbol = variant == 1 ? name : name + "_v" + std::to_string(variant);
    if (variant > 1 && (exported(symbol.c_str()) == nullptr || version < since(symbol))) {
      continue;
    }
    for (char const* suffix : {"_ptsz", "_ptds"}) {
      void* found = per_thread ? exported((symbol + suffix).c_str()) : nullptr;
      if (found != nullptr) {
        return found;
      }
    }
    return exported(symbol.c_str());
  }
  return nullptr;
}

struct answers {
  std::mutex lock;
  std::map<std::string, void*> by_name;  // guarded by lock
};

answers& the_answers() {
  static answers one;
  return one;
}

void* answered_otherwise(char const* name) {
  answers& known = the_answers();
  std::lock_guard const guard{known.lock};
  auto const found = known.by_name.find(name);
  return found != known.by_name.end() ? found->second : nullptr;
}

CUresult answer(char const* name, void** function, int version, cuuint64_t flags,
                CUdriverProcAddressQueryResult* status) {
  if (name == nullptr || function == nullptr || version > CUDA_VERSION) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *function = answered_otherwise(name);
  if (*function == nullptr) {
    *function = find(name, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0);
  }
  bool const found = *function != nullptr;
  if (status != nullptr) {
    *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

struct error_text {
  CUresult code;
  char const* name;
  char const* text;
};
constexpr std::array errors{
    error_text{CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    error_text{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    error_text{CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    error_text{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    error_text{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    error_text{CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    error_text{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    error_text{CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed"},
    error_text{CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    error_text{CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    error_text{CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    error_text{CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    error_text{CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

CUresult describe(CUresult error, char const** text, char const* error_text::*what) {
  for (error_text const& one : errors) {
    if (one.code == error) {
      *text = one.*what;
      return CUDA_SUCCESS;
    }
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

SLUICE_FAKE_CALL CUresult cuGetProcAddress(char const* name, void** function, int version,
                                           cuuint64_t flags) {
  SLUICE_FAKE_ENTER_AS(__func__, needs::nothing)
  return answer(name, function, version, flags, nullptr);
}
SLUICE_FAKE_CALL CUresult cuGetProcAddress_v2(char const* name, void** function, int version,
                                              cuuint64_t flags,
                                              CUdriverProcAddressQueryResult* status) {
  SLUICE_FAKE_ENTER_AS(__func__, needs::nothing)
  return answer(name, function, version, flags, status);
}
SLUICE_FAKE_CALL CUresult cuGetErrorName(CUresult error, char const** text) {
  SLUICE_FAKE_ENTER_AS(__func__, needs::nothing)
  return describe(error, text, &error_text::name);
}
SLUICE_FAKE_CALL CUresult cuGetErrorString(CUresult error, char const** text) {
  SLUICE_FAKE_ENTER_AS(__func__, needs::nothing)
  return describe(error, text, &error_text::text);
}

extern "C" __attribute__((visibility("default"))) void fake_answer(char const* name,
                                                                   void* function) {
  answers& known = the_answers();
  std::lock_guard const guard{known.lock};
  known.by_name[name] = function;
}
