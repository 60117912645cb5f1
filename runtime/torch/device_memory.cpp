#include "runtime/torch/device_memory.hpp"

#include <dlfcn.h>

#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/device/device_memory.hpp"

namespace sluice::server {
namespace {

// As in nvml.h, which need not be there when this is built.
struct nvml_memory {
  unsigned long long total = 0, free = 0, used = 0;
};
using nvml_device = struct nvml_device_of_the_library*;

/// Stays open: the driver does not like to be unloaded.
class library {
 public:
  explicit library(char const* name) : opened_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {}

  /// What the function returns, 0 for success, or −1 if there is none.
  template <typename... Arguments>
  [[nodiscard]] int call(char const* name, Arguments... arguments) const {
    auto* const found = opened_ == nullptr ? nullptr : ::dlsym(opened_, name);
    return found == nullptr ? -1 : reinterpret_cast<int (*)(Arguments...)>(found)(arguments...);
  }

 private:
  void* opened_;
};

/// As the management library writes it; ordinals may mean other devices there.
std::optional<std::string> uuid_of(int ordinal) {
  try {
    return memhandover::to_string(memhandover::uuid_of_gpu(ordinal));
  } catch (error const&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<std::uint64_t> free_device_memory(int cuda_ordinal) {
  if (cuda_ordinal < 0) {
    return std::nullopt;
  }
  auto const uuid = uuid_of(cuda_ordinal);
  library const management{"libnvidia-ml.so.1"};
  if (!uuid || management.call("nvmlInit_v2") != 0) {
    return std::nullopt;
  }
  nvml_device device = nullptr;
  nvml_memory memory;
  bool const is_known = management.call("nvmlDeviceGetHandleByUUID", uuid->c_str(), &device) == 0 &&
                        management.call("nvmlDeviceGetMemoryInfo", device, &memory) == 0;
  (void)management.call("nvmlShutdown");
  return is_known ? std::optional<std::uint64_t>{memory.free} : std::nullopt;
}

}  // namespace sluice::server
