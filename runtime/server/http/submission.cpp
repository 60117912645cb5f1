#include "runtime/server/http/submission.hpp"

#include <spdlog/spdlog.h>

#include <atomic>
#include <exception>
#include <memory>
#include <utility>

#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

class pending_answer {
 public:
  explicit pending_answer(std::function<void(infer_result)> deliver)
      : deliver_(std::move(deliver)) {}
  pending_answer(pending_answer const&) = delete;
  pending_answer& operator=(pending_answer const&) = delete;
  pending_answer(pending_answer&&) = delete;
  pending_answer& operator=(pending_answer&&) = delete;
  ~pending_answer() {
    try {
      deliver(error{error_kind::internal, "the service dropped a request without an answer"});
    } catch (std::exception const& failure) {
      spdlog::error("an answer was lost reason={}", telemetry::quoted(failure.what()));
    }
  }

  void deliver(infer_result result) {
    if (!used_.exchange(true)) deliver_(std::move(result));
  }

 private:
  std::function<void(infer_result)> deliver_;
  std::atomic<bool> used_{false};
};

}  // namespace

request_ticket submit(inference_service& service, infer_request request,
                      std::function<void(infer_result)> deliver) {
  auto const answer = std::make_shared<pending_answer>(std::move(deliver));
  try {
    return service.infer(std::move(request),
                         [answer](infer_result result) { answer->deliver(std::move(result)); });
  } catch (error const& failure) {
    answer->deliver(failure);
  } catch (std::exception const& failure) {
    answer->deliver(error{error_kind::internal, failure.what()});
  }
  return 0;
}

}  // namespace sluice::server
