#include "nccl_shim/agreement/store_meeting.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "nccl_shim/agreement/heartbeat.hpp"
#include "nccl_shim/agreement/words_in_store.hpp"

namespace sluice::nccl_shim {
namespace {

using host_name = std::array<char, 65>;

}  // namespace

std::unique_ptr<store_meeting> store_meeting::join(store& in, std::string const& key) {
  std::unique_ptr<store_meeting> made{new store_meeting{in, "sluice/" + key + '/'}};
  auto const place = in.add(made->prefix_ + "places", 1);
  if (!place) {
    return nullptr;
  }
  auto const rank = static_cast<unsigned>(*place - 1);
  words_in_store::make(in, made->prefix_, rank);
  heartbeat::make(in, made->prefix_, rank);
  return in.add(made->prefix_ + "joined", 1) ? std::move(made) : nullptr;
}

store_meeting::store_meeting(store& in, std::string prefix) noexcept
    : in_{in}, prefix_{std::move(prefix)} {}

store_meeting::~store_meeting() {
  auto const all = joined();
  auto const left = in_.add(prefix_ + "left", 1);
  if (!all || !left || static_cast<unsigned>(*left) != *all) {
    return;
  }
  words_in_store::remove(in_, prefix_, *all);
  heartbeat::remove(in_, prefix_, *all);
  for (unsigned rank = 0; rank < *all; ++rank) {
    in_.remove(prefix_ + "host/" + std::to_string(rank));
  }
  for (char const* const counter : {"places", "joined", "left"}) {
    in_.remove(prefix_ + counter);
  }
}

std::optional<unsigned> store_meeting::joined() const noexcept {
  auto const found = in_.add(prefix_ + "joined", 0);
  return found ? std::optional{static_cast<unsigned>(*found)} : std::nullopt;
}

void store_meeting::publish_host(unsigned rank) noexcept {
  host_name name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string const key = prefix_ + "host/" + std::to_string(rank);
  std::array const all{
      store::written{key, std::as_bytes(std::span{name.data(), ::strlen(name.data())})}};
  in_.set(all);
}

std::string store_meeting::host_of(unsigned rank) const {
  host_name name{};
  std::string const key = prefix_ + "host/" + std::to_string(rank);
  static_cast<void>(in_.get({&key, 1}, std::as_writable_bytes(std::span{name})));
  return name.data();
}

}  // namespace sluice::nccl_shim
