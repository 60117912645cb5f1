#include "runtime/torch/model/torch_model.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <dlfcn.h>
#include <malloc.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string_view>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "runtime/server/hosting/model_file.hpp"
#include "runtime/server/hosting/model_log.hpp"
#include "runtime/server/hosting/torch_errors.hpp"
#include "runtime/torch/model/detail/code_effects.hpp"
#include "runtime/torch/model/detail/computation.hpp"
#include "runtime/torch/model/detail/model_recordings.hpp"
#include "runtime/torch/model/detail/signature.hpp"
#include "runtime/torch/model/detail/torch_tensors.hpp"
#include "runtime/torch/model/detail/torch_weights.hpp"
#include "runtime/torch/model/torch_file.hpp"

namespace sluice::server {
namespace {

at::Device at_device(torch_device device) {
  return device.is_cuda() ? at::Device{at::kCUDA, static_cast<at::DeviceIndex>(device.cuda_ordinal)}
                          : at::Device{at::kCPU};
}

torch::jit::Module read_whole_module(std::shared_ptr<model_file const> const& file) {
  try {
    return read_whole(file);
  } catch (error const&) {
    throw;
  } catch (std::exception const& failure) {
    throw error{error_kind::invalid_argument,
                c10::str(file->path().string(), " cannot be read as TorchScript: ",
                         first_line(failure.what()), "; save it with torch.jit.save")};
  }
}

detail::call_signature call_of(torch::jit::Module const& module,
                               torch_model_options const& options) {
  auto const method = module.find_method("forward");
  if (!method) {
    throw error{error_kind::invalid_argument, "it has no method 'forward'"};
  }
  auto made = detail::signature_of(method->function().getSchema(), options.inputs, options.outputs);
  made.takes_batches = detail::takes_batches(made, options.inputs);
  return made;
}

void refuse_other_formats(std::shared_ptr<model_file const> const& file) {
  if (auto const format = other_format(file)) {
    throw error{
        error_kind::invalid_argument,
        c10::str(
            file->path().string(), " is ", *format,
            ", but a model is served from TorchScript, which has its code too: write that file "
            "with torch.jit.script(model.eval()).save(\"model.pt\"), or "
            "torch.jit.trace(model.eval(), example).save(\"model.pt\")")};
  }
}

/// How this version lays out a file's weights in memory. To be counted up when that changes: a server must
/// not take over what an older one has laid out in another way.
constexpr int weights_layout = 1;

class torch_model final : public hosted_model {
 public:
  explicit torch_model(torch_model_options options)
      : options_(std::move(options)),
        device_(at_device(options_.device)),
        file_(std::make_shared<model_file const>(options_.file)) {
    refuse_other_formats(file_);
    read_without_weights();
    module_.eval();
    for (auto const& each : options_.inputs) {
      (void)detail::torch_type(each.type);
    }
    for (auto const& each : options_.outputs) {
      (void)detail::torch_type(each.type);
    }
    signature_ = call_of(module_, options_);
    if (signature_.is_guess) {
      log_order_of_inputs(options_.name);
    }
    find_out_effects();
    auto const constants = detail::place_constants(module_, device_);
    ::malloc_trim(0);  // what was read may have left its size behind in the heap
    log_prepared(options_.name, weights_->bytes(), constants + weights_->outside_bytes());
  }

  [[nodiscard]] std::uint64_t bytes() const noexcept override { return weights_->bytes(); }

  [[nodiscard]] std::span<std::uint64_t const> pieces() const noexcept override {
    return weights_->pieces();
  }

  [[nodiscard]] std::string fingerprint() const override {
    return c10::str("layout=", weights_layout, ' ', file_->fingerprint());
  }

  [[nodiscard]] std::uint64_t image_bytes() const noexcept override {
    return weights_->image().ready_bytes();
  }

  [[nodiscard]] std::uint64_t read_bytes() const noexcept override { return file_->read_bytes(); }

  void extend_image() override {
    try {
      auto const here = on_device();
      weights_->image().extend();
    } catch (...) {
      rethrow_as_error(c10::str("reading the weights of model '", options_.name, "'"),
                       error_kind::internal);
    }
    note_image();
  }

  void load(std::span<std::byte* const> memory) override {
    bind([&] { weights_->bind(memory); });
    note_image();
  }

  void load_spare(std::span<std::byte* const> memory, std::stop_token const& called_off) override {
    bind([&] { weights_->bind(memory, called_off); });
    note_image();
  }

  void attach(std::span<std::byte* const> memory) override {
    bind([&] { weights_->attach(memory); });
  }

  [[nodiscard]] bool is_intact() const noexcept override { return undone_; }

  [[nodiscard]] std::uint64_t activation_bytes() const noexcept override {
    return activation_peak_.bytes;
  }

  [[nodiscard]] std::size_t most_at_once() const noexcept override {
    return is_constant_ ? options_.computing.instances : 1;
  }

  bool rest() noexcept override { return recordings_.clear(); }

  void unload() override {
    try {
      auto const here = on_device();
      (void)rest();
      weights_->unbind();
    } catch (...) {
      rethrow_as_error(c10::str("unloading model '", options_.name, "'"), error_kind::internal);
    }
  }

  /// A kernel's error is told by whatever asks the device next, and by all that comes after it.
  [[nodiscard]] bool device_works() const noexcept override {
    if (device_.is_cpu()) {
      return true;
    }
    try {
      c10::impl::VirtualGuardImpl const guard{device_.type()};
      guard.synchronizeDevice(device_.index());
      return true;
    } catch (...) {
      return false;
    }
  }

  [[nodiscard]] std::vector<tensor> run(std::vector<tensor>& inputs,
                                        std::vector<std::string> const& wanted) override {
    model_call call{inputs, wanted};
    run_together({&call, 1});
    return std::move(call.outputs);
  }

  [[nodiscard]] bool can_batch() const noexcept override { return signature_.takes_batches; }

  void run_together(std::span<model_call> calls) override {
    auto const here = on_device();
    undo_or_say(
        error_kind::internal);  // what an earlier request has changed, and could not be undone then
    std::exception_ptr failure;
    auto whose = error_kind::invalid_argument;
    try {
      c10::InferenceMode const inference;
      detail::computation const measured{device_, activation_peak_};
      auto arguments = detail::to_arguments(calls, options_.inputs, signature_, device_);
      whose = error_kind::model_error;
      if (!is_constant_) {
        undone_ = false;
      }
      compute(std::move(arguments), calls);
    } catch (...) {
      failure = std::current_exception();
    }
    if (!failure) {
      undo_or_say(error_kind::internal);
      return;
    }
    try {
      detail::wait_for(device_);  // what was launched before it failed still uses the weights
      undo_changes();
    } catch (...) {  // the next request tries again, and says why not
    }
    rethrow_as_error(c10::str("model '", options_.name, "'"), whose, failure);
  }

 private:
  void read_without_weights() {
    if (auto const structure = read_structure(file_)) {
      module_ = structure->module;
      weights_.emplace(*structure, file_, device_);
      if (weights_->holds_all_unread()) {
        return;
      }
    }
    module_ = read_whole_module(file_);
    weights_.emplace(torch_structure{module_, {}}, file_, device_);
  }

  void undo_or_say(error_kind otherwise) {
    try {
      undo_changes();
    } catch (...) {
      rethrow_as_error(
          c10::str("putting back what model '", options_.name, "' changes of its weights"),
          otherwise);
    }
  }

  void undo_changes() {
    if (!undone_) {
      weights_->undo_changes();
      undone_ = true;
    }
  }

  /// Whether computations may run beside each other, and be repeated by launches alone, if either is wanted.
  void find_out_effects() {
    bool const wants_records = options_.computing.records_launches && device_.is_cuda();
    if (options_.computing.instances == 1 && !wants_records) {
      return;
    }
    auto const effect = detail::lasting_effect_of(module_);
    is_constant_ = !effect;
    if (effect) {
      log_computed_alone(options_.name, *effect);
    }
    if (wants_records && is_constant_ && !detail::takes_numbers(signature_)) {
      recordings_.begin();
    }
  }

  /// Once, when it is complete.
  void note_image() {
    if (image_noted_ || image_bytes() < bytes()) {
      return;
    }
    image_noted_ = true;
    ::malloc_trim(0);  // the buffers of its steps, or all weights if they were read at once
    log_image(options_.name, bytes(), weights_->image().pinned());
    plan();
  }

  /// What the interpreter makes of the code before it first runs it, so that no request waits for that.
  void plan() noexcept {
    try {
      torch::jit::GraphOptimizerEnabledGuard const unoptimised{false};
      torch::jit::Stack none;
      (void)torch::jit::toGraphFunction(module_.get_method("forward").function())
          .get_executor()
          .getPlanFor(none);
    } catch (...) {  // the first request says why it cannot be run
    }
  }

  template <typename Binding>
  void bind(Binding const& binding) {
    try {
      auto const here = on_device();
      binding();
      undone_ = true;
    } catch (...) {
      weights_->unbind();
      rethrow_as_error(c10::str("loading model '", options_.name, "'"), error_kind::internal);
    }
  }

  /// Makes the model's GPU the current one: a model may make tensors on "cuda" without saying
  /// which.
  [[nodiscard]] c10::OptionalDeviceGuard on_device() const {
    return c10::OptionalDeviceGuard{device_.is_cpu() ? std::nullopt : std::optional{device_}};
  }

  void compute(std::vector<c10::IValue> arguments, std::span<model_call> calls) {
    auto const forward = [this](std::vector<c10::IValue> given) {
      torch::jit::GraphOptimizerEnabledGuard const unoptimised{false};
      return module_.forward(std::move(given));
    };
    auto const result = recordings_.run(std::move(arguments), forward);
    try {
      detail::from_result(result, options_.outputs, signature_.output_places, calls);
    } catch (error const& failure) {
      bool const is_misfit = failure.kind() == error_kind::misconfigured && calls.size() == 1;
      if (is_misfit && !misfit_logged_.exchange(true)) {
        log_misconfigured(options_.name, failure.what());
      }
      throw;
    }
  }

  torch_model_options const options_;
  at::Device const device_;
  std::shared_ptr<model_file const> const file_;
  torch::jit::Module module_;
  detail::call_signature signature_;
  std::optional<detail::torch_weights> weights_;
  bool undone_ = true;  ///< what the last computation has changed
  detail::activation_peak activation_peak_;
  bool image_noted_ = false;
  std::atomic<bool> misfit_logged_ = false;
  bool is_constant_ = false;  ///< no computation changes what another one sees
  detail::model_recordings recordings_{options_.name};
};

}  // namespace

void start_torch(torch_device device) {
  if (!device.is_cuda()) {
    return;
  }
  // torch finds its own libraries beside each other, wherever that torch is installed.
  Dl_info here{};
  if (::dladdr(reinterpret_cast<void const*>(&at::get_num_threads), &here) == 0) {
    throw error{error_kind::unsupported, "the folder of libtorch_cpu cannot be found"};
  }
  auto const library = std::filesystem::path{here.dli_fname}.parent_path() / "libtorch_cuda.so";
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw error{error_kind::unsupported,
                c10::str("the pool lies on a GPU, but this torch cannot use one: ", ::dlerror())};
  }
  auto const found = at::hasCUDA() ? static_cast<int>(at::detail::getCUDAHooks().deviceCount()) : 0;
  if (found > 0) {
    at::globalContext().lazyInitDevice(at::kCUDA);
  }
  if (device.cuda_ordinal >= found) {
    throw error{error_kind::unsupported, c10::str("the pool lies on GPU ", device.cuda_ordinal,
                                                  ", but torch sees ", found, " of them")};
  }
}

void set_torch_threads(int threads) {
  at::set_num_threads(threads);
}

void use_own_stream(torch_device device) {
  if (device.is_cuda()) {
    c10::impl::VirtualGuardImpl const guard{at::kCUDA};
    (void)guard.exchangeStream(guard.getStreamFromGlobalPool(at_device(device)));
  }
}

std::unique_ptr<hosted_model> prepare_torch_model(torch_model_options options) {
  auto const name = options.name;
  try {
    return std::make_unique<torch_model>(std::move(options));
  } catch (...) {
    rethrow_as_error(c10::str("model '", name, "'"), error_kind::invalid_argument);
  }
}

}  // namespace sluice::server
