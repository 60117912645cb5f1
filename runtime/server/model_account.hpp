/// What the server itself keeps of one version of a model, whichever process computes it.
///
///   model_account account{"add", "1"};
///   account.on_answer(result);
///
/// Thread-safe.
#pragma once

#include <mutex>
#include <string>

#include "runtime/server/inference/inference_service.hpp"
#include "runtime/telemetry/recurring_lines.hpp"

namespace sluice::server {

class model_account {
 public:
  model_account(std::string name, std::string version)
      : name_(std::move(name)), version_(std::move(version)) {}

  void on_answer(infer_result const& result);

 private:
  void log(error const& failure);

  std::string const name_, version_;
  std::mutex mutex_;  ///< guards what follows
  telemetry::recurring_lines failures_;
};

}  // namespace sluice::server
