/// The examples in the headers of runtime/torch/model/, word for word: compiled, never run.
#include <torch/csrc/jit/api/module.h>

#include <cstddef>
#include <vector>

#include "memhandover/allocation/tensor_heap.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/torch/model/detail/torch_weights.hpp"
#include "runtime/torch/model/torch_model.hpp"

namespace sluice::server::header_examples {

using namespace detail;

void of_torch_model(model_metadata const& metadata, memhandover::loaded_tensors const& tensors,
                    std::vector<tensor> inputs) {
  start_torch({.cuda_ordinal = -1});
  auto model = prepare_torch_model({.name = "add",
                                    .file = "/models/add/1/model.pt",
                                    .inputs = metadata.inputs,
                                    .outputs = metadata.outputs});
  model->load(tensors.addresses());
  auto outputs = model->run(inputs, {});
  model->unload();
}

void of_torch_weights(torch::jit::Module const& module, std::vector<std::byte*> const& memory) {
  torch_weights weights{module, at::kCPU};
  weights.bind(memory);
  weights.undo_changes();
  weights.unbind();
}

}  // namespace sluice::server::header_examples
