#include "memhandover/client/pinned_copies.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using std::chrono::milliseconds;

constexpr std::uint64_t piece_bytes = 64_MiB;
constexpr milliseconds until_pages_come{100};

}  // namespace

pinned_copies::~pinned_copies() {
  auto const piece = slots_of_a_piece();
  for (std::uint32_t first = 0; first < slots_.load(); first += piece) {
    (void)driver_->cuMemHostUnregister(share_.at(first).data());
  }
}

std::uint32_t pinned_copies::slots_of_a_piece() const noexcept {
  return static_cast<std::uint32_t>(
      std::max<std::uint64_t>(1, piece_bytes / share_.header().slot_bytes));
}

void pinned_copies::use_context() {
  CUcontext context = nullptr;
  if (driver_->cuCtxGetCurrent(&context) == CUDA_SUCCESS && context != nullptr) {
    return;
  }
  CUdevice handle = 0;
  driver_->check(driver_->cuDeviceGet(&handle, device_), "cannot use GPU ", device_);
  driver_->check(driver_->cuDevicePrimaryCtxRetain(&context, handle), "cannot start GPU ", device_);
  driver_->check(driver_->cuCtxSetCurrent(context), "cannot use GPU ", device_);
}

std::optional<milliseconds> pinned_copies::advance() {
  auto const& header = share_.header();
  auto const first = slots_.load();
  auto const count = std::min(slots_of_a_piece(), header.slots - first);
  if (count == 0) {
    return std::nullopt;
  }
  if (header.populated.load() < (std::uint64_t{first} + count) * header.slot_bytes) {
    return until_pages_come;
  }
  try {
    driver_->expect(driver_part::pinning, "host copies cannot be pinned");
    use_context();
    driver_->check(driver_->cuMemHostRegister(share_.at(first).data(), count * header.slot_bytes,
                                              CU_MEMHOSTREGISTER_PORTABLE),
                   "cannot pin ", count, " slots of the host copies");
  } catch (error const& why) {
    spdlog::warn(
        "the host copies stay as they are, so that less can be parked pinned={} reason=\"{}\"",
        first, why.what());
    return std::nullopt;
  }
  slots_.store(first + count);
  return first + count < header.slots ? std::optional{milliseconds{0}} : std::nullopt;
}

}  // namespace sluice::memhandover
