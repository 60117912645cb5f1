/// A request on its way to the service and its result on the way back, whatever the service does.
#pragma once

#include <functional>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// Calls `deliver` exactly once: also where the service throws, answers twice, or drops the request without an answer, of which clients
/// hear instead of waiting. On a thread of the service's, or before this returns. Returns what `cancel` takes; 0: nothing waits.
request_ticket submit(inference_service& service, infer_request request,
                      std::function<void(infer_result)> deliver);

}  // namespace sluice::server
