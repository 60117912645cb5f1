#include "memhandover/client/pinned_copies.hpp"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using std::chrono::milliseconds;

constexpr std::uint64_t piece_bytes = 64_MiB;
constexpr milliseconds until_pages_come{100};

}  // namespace

pinned_copies::pinned_copies(host_copy_share& share, std::shared_ptr<cuda_driver const> driver,
                             int device) noexcept
    : share_(share), driver_(std::move(driver)), device_(device), owner_(::getpid()) {}

/// In a forked child neither the mapping nor the driver is there.
pinned_copies::~pinned_copies() {
  if (slots_.load() == 0 || ::getpid() != owner_) {
    return;
  }
  CUcontext before = nullptr;
  bool const has_none = driver_->cuCtxGetCurrent(&before) != CUDA_SUCCESS || before == nullptr;
  if (has_none) {
    (void)driver_->cuCtxSetCurrent(context_);
  }
  auto const piece = slots_of_a_piece();
  for (std::uint32_t first = 0; first < slots_.load(); first += piece) {
    (void)driver_->cuMemHostUnregister(share_.at(first).data());
  }
  if (staging_.load()) {
    (void)driver_->cuMemHostUnregister(share_.staging().data());
  }
  if (has_none) {
    (void)driver_->cuCtxSetCurrent(nullptr);
  }
}

std::uint32_t pinned_copies::slots_of_a_piece() const noexcept {
  return static_cast<std::uint32_t>(
      std::max<std::uint64_t>(1, piece_bytes / share_.shape().slot_bytes));
}

void pinned_copies::use_context() {
  if (driver_->cuCtxGetCurrent(&context_) == CUDA_SUCCESS && context_ != nullptr) {
    return;
  }
  CUdevice handle = 0;
  driver_->check(driver_->cuDeviceGet(&handle, device_), "cannot use GPU ", device_);
  driver_->check(driver_->cuDevicePrimaryCtxRetain(&context_, handle), "cannot start GPU ",
                 device_);
  driver_->check(driver_->cuCtxSetCurrent(context_), "cannot use GPU ", device_);
}

bool pinned_copies::has_all() const noexcept {
  return slots_.load() == share_.shape().memory_slots() &&
         (staging_.load() || share_.staging().empty());
}

void pinned_copies::pin(std::byte* where, std::size_t bytes) const {
  driver_->check(driver_->cuMemHostRegister(where, bytes, CU_MEMHOSTREGISTER_PORTABLE),
                 "cannot pin ", bytes, " bytes of the host copies");
}

std::optional<milliseconds> pinned_copies::advance() {
  auto const shape = share_.shape();
  auto const first = slots_.load();
  auto const count = std::min(slots_of_a_piece(), shape.memory_slots() - first);
  if (has_all() || refused_) {
    return std::nullopt;
  }
  if (share_.populated() < (std::uint64_t{first} + count) * shape.slot_bytes) {
    return until_pages_come;
  }
  try {
    driver_->expect(driver_part::pinning, "host copies cannot be pinned");
    use_context();
    if (count > 0) {
      pin(share_.at(first).data(), count * shape.slot_bytes);
    } else {
      pin(share_.staging().data(), share_.staging().size());
      staging_.store(true);
    }
  } catch (error const& why) {
    refused_ = true;
    spdlog::warn(
        "{} of the {} of host copies are pinned, and no more can be parked there; reason=\"{}\"",
        format_bytes(first * shape.slot_bytes), format_bytes(shape.bytes()), why.what());
    return std::nullopt;
  }
  slots_.store(first + count);
  return has_all() ? std::nullopt : std::optional{milliseconds{0}};
}

}  // namespace sluice::memhandover
