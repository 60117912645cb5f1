#include "runtime/torch/device_memory.hpp"

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

namespace sluice::server {
namespace {

// As in nvml.h and cuda.h, which need not be there when this is built.
struct nvml_memory {
  unsigned long long total = 0, free = 0, used = 0;
};
using nvml_device = struct nvml_device_of_the_library*;
using uuid_bytes = std::array<unsigned char, 16>;

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
  library const driver{"libcuda.so.1"};
  int device = 0;
  uuid_bytes bytes{};
  if (driver.call("cuInit", 0U) != 0 || driver.call("cuDeviceGet", &device, ordinal) != 0 ||
      driver.call("cuDeviceGetUuid", &bytes, device) != 0) {
    return std::nullopt;
  }
  constexpr char const* digits = "0123456789abcdef";
  std::string text = "GPU";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) {
      text += '-';
    }
    text += digits[bytes.at(i) >> 4U];
    text += digits[bytes.at(i) & 15U];
  }
  return text;
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
