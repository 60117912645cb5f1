#include "runtime/torch/model/weights_image.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sluice::server {
namespace {

std::int64_t signed_size(std::uint64_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

std::span<std::byte> bytes_of(at::Tensor const& block) {
  return {static_cast<std::byte*>(block.data_ptr()), block.nbytes()};
}

}  // namespace

weights_image::weights_image(std::vector<part> parts, std::shared_ptr<model_file const> file,
                             at::Device device)
    : parts_(std::move(parts)),
      file_(std::move(file)),
      device_(device),
      bytes_(parts_.empty() ? 0 : parts_.back().offset + parts_.back().bytes) {}

void weights_image::read_source(part const& from, std::uint64_t skipped,
                                std::span<std::byte> to) const {
  if (from.held) {
    std::memcpy(to.data(), static_cast<std::byte const*>(from.held.data()) + skipped, to.size());
  } else {
    file_->read(from.at + skipped, to);
  }
}

/// What the image holds from `offset` on, whether it is ready or not; zeroes between the parts.
void weights_image::fill(std::uint64_t offset, std::span<std::byte> to) const {
  auto const end = offset + to.size();
  auto filled = offset;
  auto next = std::partition_point(parts_.begin(), parts_.end(), [offset](part const& each) {
    return each.offset + each.bytes <= offset;
  });
  for (; next != parts_.end() && next->offset < end; ++next) {
    auto const first = std::max(offset, next->offset);
    auto const last = std::min(end, next->offset + next->bytes);
    std::memset(to.data() + (filled - offset), 0, first - filled);
    read_source(*next, first - next->offset, to.subspan(first - offset, last - first));
    filled = last;
  }
  std::memset(to.data() + (filled - offset), 0, end - filled);
}

at::Tensor weights_image::make_block(std::uint64_t bytes) {
  auto const options = at::TensorOptions{}.dtype(at::kByte);
  if (!device_.is_cpu()) {
    try {
      return at::empty({signed_size(bytes)}, options.pinned_memory(true));
    } catch (c10::Error const&) {  // less memory may be pinned than there is
      pinned_ = false;
    }
  }
  return at::empty({signed_size(bytes)}, options);
}

void weights_image::extend() {
  std::uint64_t const begin = ready_;
  auto const bytes = std::min(step_bytes, bytes_ - begin);
  auto block = make_block(bytes);
  fill(begin, bytes_of(block));
  if (device_.is_cpu()) {
    if (!on_disk_) {
      on_disk_.emplace();
    }
    (void)on_disk_->append(bytes_of(block));  // a step is a multiple of its alignment
  } else {
    blocks_.push_back(std::move(block));
  }
  ready_ = begin + bytes;
  for (auto& each : parts_) {
    if (each.held && each.offset + each.bytes <= ready_) {
      each.held = {};
    }
  }
}

void weights_image::copy(std::uint64_t offset, std::uint64_t bytes, std::byte* to) const {
  if (offset + bytes <= ready_) {
    copy_ready(offset, bytes, to);
  } else if (device_.is_cpu()) {
    fill(offset, {to, bytes});
  } else {
    auto const passing = at::empty({signed_size(bytes)}, at::TensorOptions{}.dtype(at::kByte));
    fill(offset, bytes_of(passing));
    send(passing, to);  // of memory that is not pinned torch has read all when it returns
  }
}

void weights_image::copy_ready(std::uint64_t offset, std::uint64_t bytes, std::byte* to) const {
  if (device_.is_cpu()) {
    on_disk_->read(offset, bytes, to);
    return;
  }
  for (std::uint64_t done = 0; done < bytes;) {
    auto const within = (offset + done) % step_bytes;
    auto const count = std::min(bytes - done, step_bytes - within);
    send(blocks_[(offset + done) / step_bytes].narrow(0, signed_size(within), signed_size(count)),
         to + done);
    done += count;
  }
}

void weights_image::send(at::Tensor const& from, std::byte* to) const {
  at::from_blob(
      to, from.sizes(), [](void*) {}, at::TensorOptions{}.dtype(at::kByte).device(device_), device_)
      .copy_(from, /*non_blocking=*/true);
}

}  // namespace sluice::server
