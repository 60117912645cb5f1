/// What is slow because it is the first: code of torch's libraries that no page holds yet, the tables, handles and threads that
/// operators make when they are first called. A rehearsal has them made before anybody waits. This header knows no torch.
///
///   start_torch({.cuda_ordinal = -1});
///   rehearse({.cuda_ordinal = -1});
#pragma once

#include "runtime/torch/model/torch_model.hpp"

namespace sluice::server {

/// Computes something small in TorchScript, with the operators that most models have, on the calling thread; returns when the
/// device has done it. Handles of a GPU's libraries stay with the thread, and are the next one's when it ends. Throws `internal`
/// if the device cannot compute.
void rehearse(torch_device device);

}  // namespace sluice::server
