#include "tests/runtime/step/warm_role.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/client/serving_pool.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using memhandover::placement;
using memhandover::serving_pool;

/// Differs in every word of a memory and between keys.
std::uint64_t pattern(std::string const& key, std::size_t word) {
  return (std::hash<std::string>{}(key) ^ word) * 0x9e3779b97f4a7c15ULL;
}

std::vector<std::byte> blob_of(std::string const& key) {
  std::vector<std::byte> blob(3000);
  std::memcpy(blob.data(), key.data(), key.size());
  return blob;
}

class warm_server {
 public:
  explicit warm_server(std::string const& folder) : pool_(join(folder)) {}

  std::string act(std::string const& verb, std::string const& key, std::uint64_t mebibytes) {
    auto& warm = *pool_->warm();
    if (verb == "publish" || verb == "scatter") {
      // Twice as many pieces as are needed, of which every second one is all that is free.
      std::map<std::uint64_t, placement> pieces;
      for (std::uint64_t i = 0; verb == "scatter" && i < 2 * mebibytes; ++i) {
        pieces[i] = take(1_MiB);
      }
      auto const rest = verb == "scatter" ? take(pool_->usage().free_bytes) : placement{};
      std::erase_if(pieces, [](auto const& piece) { return piece.first % 2 == 0; });
      auto memory = take(mebibytes << 20U);
      auto* const words = reinterpret_cast<std::uint64_t*>(memory.data());
      for (std::size_t i = 0; i < memory.bytes() / sizeof *words; ++i) {
        words[i] = pattern(key, i);
      }
      // Not all of it, so that neither end is a chunk's.
      warm.publish(key, memory.data() + margin, memory.bytes() - 2 * margin, blob_of(key));
      held_[key] = std::move(memory);
      for (auto& [number, piece] : pieces) {
        held_["piece " + std::to_string(number)] = std::move(piece);
      }
      return "published " + key;
    }
    if (verb == "take") {
      held_["taken " + std::to_string(held_.size())] = take(mebibytes << 20U);
      return "took " + std::to_string(mebibytes);
    }
    if (verb == "inherited") {
      std::vector<std::string> keys;
      for (auto const& each : warm.inherited()) {
        keys.push_back(each.key);
      }
      std::sort(keys.begin(), keys.end());
      std::string text = "inherited";
      for (auto const& each : keys) {
        text += " " + each;
      }
      return text;
    }
    if (verb == "claim") {
      return claim(key);
    }
    if (verb == "let-go") {
      warm.release(key);
      return "let go " + key;
    }
    held_.clear();
    return "dropped";
  }

 private:
  static constexpr std::size_t margin = 4096;

  static std::shared_ptr<serving_pool> join(std::string const& folder) {
    serving_pool::options options;
    options.runtime_dir = folder;
    return serving_pool::join(options);
  }

  [[nodiscard]] placement take(std::uint64_t bytes) const {
    return pool_->acquire(bytes, std::chrono::steady_clock::now() + std::chrono::seconds{10});
  }

  std::string claim(std::string const& key) {
    auto& warm = *pool_->warm();
    std::vector<std::byte> blob;
    for (auto const& each : warm.inherited()) {
      if (each.key == key) {
        blob = each.blob;
      }
    }
    auto memory = warm.claim(key);
    if (!memory) {
      return "nothing is left as " + key;
    }
    auto const* const words = reinterpret_cast<std::uint64_t const*>(memory.data());
    for (std::size_t i = 0; i < memory.bytes() / sizeof *words; ++i) {
      if (words[i] != pattern(key, i + margin / sizeof *words)) {
        return "word " + std::to_string(i) + " of " + key + " has changed";
      }
    }
    held_[key] = std::move(memory);
    return blob == blob_of(key) ? "claimed " + key : "the blob of " + key + " has changed";
  }

  std::shared_ptr<serving_pool> pool_;
  std::map<std::string, placement> held_;
};

}  // namespace

int warm_role(std::vector<std::string> const& arguments) {
  ::signal(SIGTERM, SIG_DFL);
  auto say = [](std::string const& text) {
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
  };
  try {
    auto server = std::make_unique<warm_server>(arguments.at(0));
    say("joined");
    for (std::size_t i = 1; i < arguments.size(); ++i) {
      auto const& action = arguments[i];
      if (action == "end") {
        return 0;
      }
      auto const colon = action.find(':');
      auto const second = action.rfind(':');
      auto const verb = action.substr(0, colon);
      std::uint64_t mebibytes = 0;
      std::string key;
      if (verb == "take") {
        mebibytes = std::stoull(action.substr(colon + 1));
      } else if (colon != std::string::npos) {
        key = action.substr(colon + 1, second == colon ? std::string::npos : second - colon - 1);
        mebibytes = second == colon ? 0 : std::stoull(action.substr(second + 1));
      }
      say(server->act(verb, key, mebibytes));
    }
    for (;;) {
      ::pause();
    }
  } catch (std::exception const& why) {
    say(std::string{"error: "} + why.what());
    return 4;
  }
}

}  // namespace sluice::test
