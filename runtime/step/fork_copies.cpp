#include "runtime/step/fork_copies.hpp"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace sluice::step {

void fork_copies::make(training_spaces const& spaces) noexcept {
  try {
    twins_.reserve(1 + spaces.promoted().size());
  } catch (std::bad_alloc const&) {
    return;  // as where there are no pages for a copy
  }
  copy(spaces.arena());
  for (auto const& old : spaces.promoted()) {
    copy(*old);
  }
}

void fork_copies::copy(training_spaces::space const& shared) {
  if (shared.revoked() || shared.ranges().live() == 0) {
    return;
  }
  void* const twin = ::mmap(nullptr, shared.bytes(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (twin != MAP_FAILED) {
    twins_.emplace_back(&shared, static_cast<std::byte*>(twin));
    shared.ranges().for_each([&](std::size_t offset, std::size_t size) {
      std::memcpy(static_cast<std::byte*>(twin) + offset, shared.base() + offset, size);
    });
  }
}

void fork_copies::drop() noexcept {
  for (auto const& [shared, twin] : twins_) {
    ::munmap(twin, shared->bytes());
  }
  twins_.clear();
}

void fork_copies::put_in_place() noexcept {
  for (auto const& [shared, twin] : twins_) {
    auto const bytes = shared->bytes();
    ::mremap(twin, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, shared->base());
  }
}

}  // namespace sluice::step
