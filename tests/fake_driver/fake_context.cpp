#include "tests/fake_driver/fake_context.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <vector>

#include "tests/fake_driver/fake_stream.hpp"

namespace sluice::fake {
namespace {

struct contexts {
  std::mutex lock;
  std::deque<context> all;  // guarded by lock; never shrinks, so that dead handles can be told
  std::vector<context*> primaries;  // guarded by lock; by device
};

contexts& the_contexts() {
  static contexts& one = *new contexts;  // never freed: threads of streams outlive static objects
  return one;
}

thread_local std::vector<context*> stack;

context* make_context(CUdevice device) {
  contexts& known = the_contexts();
  context& made = known.all.emplace_back();
  made.device = device;
  return &made;
}

context* primary(CUdevice device) {
  contexts& known = the_contexts();
  std::lock_guard const guard{known.lock};
  known.primaries.resize(static_cast<std::size_t>(device_count()));
  context*& one = known.primaries[static_cast<std::size_t>(device)];
  if (one == nullptr) {
    one = make_context(device);
  }
  return one;
}

bool is_context(CUcontext handle) {
  contexts& known = the_contexts();
  std::lock_guard const guard{known.lock};
  for (context const& one : known.all) {
    if (reinterpret_cast<CUcontext>(const_cast<context*>(&one)) == handle) {
      return one.alive.load();
    }
  }
  return false;
}

CUcontext handle_of(context* one) {
  return reinterpret_cast<CUcontext>(one);
}
context* context_of(CUcontext handle) {
  return reinterpret_cast<context*>(handle);
}

CUresult create_context(CUcontext* out, CUdevice device) {
  if (out == nullptr || !is_device(device)) {
    return out == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
  }
  contexts& known = the_contexts();
  std::lock_guard const guard{known.lock};
  stack.push_back(make_context(device));
  *out = handle_of(stack.back());
  return CUDA_SUCCESS;
}

CUresult release_primary(CUdevice device, bool entirely) {
  if (!is_device(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  context* one = primary(device);
  if (one->users.load() == 0) {
    return entirely ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  }
  if (entirely) {
    one->users.store(0);
  } else {
    one->users.fetch_sub(1);
  }
  return CUDA_SUCCESS;
}

}  // namespace

context* current_context() {
  return stack.empty() ? nullptr : stack.back();
}

}  // namespace sluice::fake

using namespace sluice::fake;

/// What CUDA_VISIBLE_DEVICES, a list of numbers, has in a device's place.
static int number_on_the_machine(CUdevice device) {
  char const* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr || *visible == '\0') {
    return device;
  }
  for (int i = 0; i < device && visible != nullptr; ++i) {
    visible = std::strchr(visible + 1, ',');
  }
  return visible == nullptr ? -1 : std::atoi(*visible == ',' ? visible + 1 : visible);
}

SLUICE_FAKE_CALL CUresult cuInit(unsigned flags) {
  SLUICE_FAKE_ENTER_AS(__func__, needs::nothing)
  if (flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (device_count() == 0) {
    return CUDA_ERROR_NO_DEVICE;
  }
  set_initialised();
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDriverGetVersion(int* version) {
  SLUICE_FAKE_ENTER_AS(__func__, needs::nothing)
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDeviceGetCount(int* count) {
  SLUICE_FAKE_ENTER
  *count = device_count();
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  SLUICE_FAKE_ENTER
  if (!is_device(ordinal)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *device = ordinal;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  SLUICE_FAKE_ENTER
  if (!is_device(device) || length <= 0) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  std::snprintf(name, static_cast<std::size_t>(length), "Sluice fake device %d", device);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  SLUICE_FAKE_ENTER
  if (!is_device(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  std::memset(uuid->bytes, 0, sizeof(uuid->bytes));
  std::snprintf(uuid->bytes, sizeof(uuid->bytes), "fake-%d", number_on_the_machine(device));
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  SLUICE_FAKE_ENTER
  if (!is_device(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *bytes = device_memory_bytes();
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                               CUdevice device) {
  SLUICE_FAKE_ENTER
  if (!is_device(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      *value = 1;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 4;
      break;
    default:
      *value = 0;
      break;
  }
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  SLUICE_FAKE_ENTER
  if (!is_device(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  context* one = primary(device);
  one->users.fetch_add(1);
  *out = handle_of(one);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  SLUICE_FAKE_ENTER
  return release_primary(device, false);
}

SLUICE_FAKE_CALL CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  SLUICE_FAKE_ENTER
  return release_primary(device, true);
}

SLUICE_FAKE_CALL CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

SLUICE_FAKE_CALL CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags,
                                                     int* active) {
  SLUICE_FAKE_ENTER
  if (!is_device(device)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *flags = 0;
  *active = primary(device)->users.load() > 0 ? 1 : 0;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuCtxCreate_v2(CUcontext* out, unsigned /*flags*/, CUdevice device) {
  SLUICE_FAKE_ENTER
  return create_context(out, device);
}

SLUICE_FAKE_CALL CUresult cuCtxCreate_v4(CUcontext* out, CUctxCreateParams* /*parameters*/,
                                         unsigned /*flags*/, CUdevice device) {
  SLUICE_FAKE_ENTER
  return create_context(out, device);
}

SLUICE_FAKE_CALL CUresult cuCtxDestroy_v2(CUcontext handle) {
  SLUICE_FAKE_ENTER
  if (!is_context(handle)) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  wait_for_context(*context_of(handle));
  context_of(handle)->alive.store(false);
  if (current_context() == context_of(handle)) {
    stack.pop_back();
  }
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuCtxSetCurrent(CUcontext handle) {
  SLUICE_FAKE_ENTER
  if (handle != nullptr && !is_context(handle)) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (!stack.empty()) {
    stack.pop_back();
  }
  if (handle != nullptr) {
    stack.push_back(context_of(handle));
  }
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuCtxGetCurrent(CUcontext* out) {
  SLUICE_FAKE_ENTER
  *out = handle_of(current_context());
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  SLUICE_FAKE_ENTER
  if (!is_context(handle)) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  stack.push_back(context_of(handle));
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuCtxPopCurrent_v2(CUcontext* out) {
  SLUICE_FAKE_ENTER
  if (stack.empty()) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (out != nullptr) {
    *out = handle_of(stack.back());
  }
  stack.pop_back();
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuCtxGetDevice(CUdevice* device) {
  SLUICE_FAKE_ENTER
  if (current_context() == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *device = current_context()->device;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuCtxSynchronize() {
  SLUICE_FAKE_ENTER
  if (current_context() == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (CUresult const forbidden = forbidden_by_capture(); forbidden != CUDA_SUCCESS) {
    return forbidden;
  }
  wait_for_context(*current_context());
  return context_state();
}

SLUICE_FAKE_CALL CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  SLUICE_FAKE_ENTER
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
