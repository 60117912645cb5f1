/// Stands in the place of a model that cannot be served, so that the others have theirs. It has no weights, and cannot be
/// loaded.
///
///   models.push_back({"broken", "1", std::make_unique<absent_model>(why), {}});
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/hosted_model.hpp"

namespace sluice::server {

class absent_model final : public hosted_model {
 public:
  explicit absent_model(error why) : why_(std::move(why)) {}

  [[nodiscard]] std::uint64_t bytes() const noexcept override { return 0; }
  [[nodiscard]] std::span<std::uint64_t const> pieces() const noexcept override { return {}; }
  void load(std::span<std::byte* const> /*memory*/) override { throw error{why_}; }
  void unload() override {}
  [[nodiscard]] std::vector<tensor> run(std::vector<tensor>& /*inputs*/,
                                        std::vector<std::string> const& /*wanted*/) override {
    throw error{why_};
  }

 private:
  error const why_;
};

}  // namespace sluice::server
