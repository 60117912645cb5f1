/// TorchScript models whose weights live in memory that somebody else lends. This header knows no
/// torch.
///
///   start_torch({.cuda_ordinal = -1});
///   auto model = prepare_torch_model({.name = "add",
///                                     .file = "/models/add/1/model.pt",
///                                     .inputs = metadata.inputs,
///                                     .outputs = metadata.outputs});
///   model->load(tensors.addresses());
///   auto outputs = model->run(inputs, {});
///   model->unload();
///
/// *Prepare* reads the file's code and structure, but not the bytes of parameters, buffers and other tensor
/// attributes. These are read into a weights image by `extend_image`, or at the latest by `load`: an unlinked
/// file, which costs page cache only, or with a GPU pinned host memory. A cold model holds no weights besides.
/// The file stays open until then and later: who replaces it changes nothing here, and who writes to it before
/// its weights are in the image makes `load` fail. A file whose reading runs code of its own (`__setstate__`),
/// or of which torch packs tensors into another form, and weights that are compressed are read at once.
///
/// *Load* copies the image into the lent memory, one piece for each storage of the file and neighbours at
/// once; tensors that shared storage or had strides of their own still do. *Attach* needs no image.
///
/// What is not in the lent memory: tensors that the file keeps as constants of its code (a frozen
/// module has all its weights there), quantised and sparse tensors (`outside_bytes` counts these), and what
/// a computation allocates while it runs, of which activations.hpp speaks.
///
/// Requests are independent: attributes that `forward` assigns are put back afterwards, and tensors
/// that it changed in place are read again, from the image or the file. So whether a model went cold between two
/// requests never shows in an answer. Only what it puts *into* a list or dictionary attribute
/// stays.
///
/// A model whose code changes nothing of its own may compute several requests at once, and have its launches on a GPU
/// recorded by each thread that computes (`computing`, detail/code_effects.hpp, detail/model_recordings.hpp).
///
/// Code runs unoptimised by TorchScript's profiling executor, which would compile in the middle of
/// the second request of every shape.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "runtime/server/inference/computing_rules.hpp"
#include "runtime/server/inference/hosted_model.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

struct torch_device {
  int cuda_ordinal = -1;  ///< −1: the CPU
  [[nodiscard]] bool is_cuda() const noexcept { return cuda_ordinal >= 0; }
};

/// Once, before the first model. With a GPU it opens libtorch_cuda from the folder of the torch in
/// use, so that one binary runs with and without. Throws `unsupported` if this torch has no CUDA or
/// sees no such device.
void start_torch(torch_device device);

/// How many threads one operator of the *calling* thread may use.
void set_torch_threads(int threads);

/// What the calling thread computes on a GPU goes to a stream of its own from now on, beside that of other threads.
void use_own_stream(torch_device device);

struct torch_model_options {
  std::string name;
  std::filesystem::path file;
  /// In the order of the configuration; which of them is which argument of `forward`, and which result, their names say
  /// (detail/naming.hpp). A dictionary is matched by name.
  std::vector<tensor_spec> inputs;
  std::vector<tensor_spec> outputs;
  torch_device device{};
  computing_rules computing{};
};

/// Reads a model. Throws `not_found` (file), `invalid_argument` (no TorchScript, or `forward` does
/// not fit `inputs` and `outputs`, as far as its code says), `unavailable` (somebody writes to the file). What only a run
/// shows of its outputs, their types above all, is `misconfigured` then.
[[nodiscard]] std::unique_ptr<hosted_model> prepare_torch_model(torch_model_options options);

}  // namespace sluice::server
