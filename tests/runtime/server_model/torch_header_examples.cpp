/// The examples in the headers of runtime/torch/model/, word for word: compiled, never run.
#include <torch/csrc/jit/api/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memhandover/allocation/tensor_heap.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/torch/model/activations.hpp"
#include "runtime/torch/model/detail/computation.hpp"
#include "runtime/torch/model/detail/model_recordings.hpp"
#include "runtime/torch/model/detail/naming.hpp"
#include "runtime/torch/model/detail/recordings.hpp"
#include "runtime/torch/model/detail/torch_weights.hpp"
#include "runtime/torch/model/rehearsal.hpp"
#include "runtime/torch/model/torch_file.hpp"
#include "runtime/torch/model/torch_model.hpp"
#include "runtime/torch/model/weights_image.hpp"

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

void of_activations(std::shared_ptr<memhandover::serving_pool> const& pool, torch_device device) {
  auto const activations = serve_activations(pool, device);
  // … models are prepared, and compute …
  activations->give_back();
}

void of_computation(at::Device device, activation_peak& most) {
  computation now{device, most};
  // … the model runs …
}

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"

void of_naming() {
  input_places({"INPUT__1", "INPUT__0"}, {{"a"}, {"b"}}).of;
  input_places({"b", "a"}, {{"a"}, {"b"}}).of;
  output_places({"OUTPUT__1"}).of;
}

#pragma GCC diagnostic pop

void of_rehearsal() {
  start_torch({.cuda_ordinal = -1});
  rehearse({.cuda_ordinal = -1});
}

void of_torch_file(std::shared_ptr<model_file const> const& file) {
  if (auto structure = read_structure(file)) {
  }
  auto module = read_whole(file);
}

void of_weights_image(std::vector<weights_image::part> const& parts,
                      std::shared_ptr<model_file const> const& file, std::uint64_t offset,
                      std::uint64_t bytes, std::byte* destination) {
  weights_image image{parts, file, at::kCUDA};
  while (image.ready_bytes() < image.bytes()) {
    image.extend();
  }
  image.copy(offset, bytes, destination);
}

void of_recordings(std::unique_ptr<launch_recorder> recorder, std::vector<c10::IValue> arguments,
                   recordings::forward const& compute) {
  recordings mine{std::move(recorder)};
  auto result = mine.run(arguments, compute);
}

void of_model_recordings(std::vector<c10::IValue> arguments, recordings::forward const& compute) {
  model_recordings all{"resnet"};
  all.begin();
  auto result = all.run(arguments, compute);
}

void of_torch_weights(torch_structure const& structure,
                      std::shared_ptr<model_file const> const& file,
                      std::vector<std::byte*> const& memory) {
  torch_weights weights{structure, file, at::kCPU};
  weights.bind(memory);
  weights.undo_changes();
  weights.unbind();
}

}  // namespace sluice::server::header_examples
