// A training job in C++ whose result can be compared bit by bit; benchmarks/exactness.py tells how
// it is run and what it writes to --out. Convolutions, batch statistics, dropout and labels drawn
// from a generator of its own, so that a discard has buffers and random state to put back.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <dlfcn.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "sluice/step.hpp"

namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using nlohmann::json;

struct command_line {
  std::string device = "cpu";
  std::string way = "adamw";
  std::int64_t width = 16;
  std::int64_t batch = 64;
  std::int64_t micro_batch = 32;
  bool adapt = false;
  bool recurrent = false;
  std::int64_t steps = 0;
  std::string until;
  std::string out;
};

command_line parsed(int argc, char** argv) {
  command_line result;
  CLI::App app{"Trains a small network; its result can be compared bit by bit"};
  app.add_option("--device", result.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--way", result.way)->check(CLI::IsMember({"adamw", "lbfgs", "scaled"}));
  app.add_option("--width", result.width);
  app.add_option("--batch", result.batch);
  app.add_option("--micro-batch", result.micro_batch);
  app.add_flag("--adapt", result.adapt);
  app.add_flag("--recurrent", result.recurrent, "its first layers are, over the pictures' rows");
  auto* const steps = app.add_option("--steps", result.steps);
  app.add_option("--until", result.until)->excludes(steps);
  app.add_option("--out", result.out)->required();
  try {
    app.parse(argc, argv);
  } catch (CLI::ParseError const& why) {
    std::exit(app.exit(why));
  }
  return result;
}

/// torch finds its own libraries beside each other, wherever it is installed.
void open_torch_cuda() {
  Dl_info here{};
  if (::dladdr(reinterpret_cast<void const*>(&at::get_num_threads), &here) == 0) {
    throw std::runtime_error{"the folder of libtorch_cpu cannot be found"};
  }
  auto const library = std::filesystem::path{here.dli_fname}.parent_path() / "libtorch_cuda.so";
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error{::dlerror()};
  }
}

/// Pictures of shape [3, 32, 32], a row after the other.
class rows_impl : public nn::Module {
 public:
  rows_impl() { register_module("recurrence", recurrence_); }

  torch::Tensor forward(torch::Tensor const& pictures) {
    auto const rows = pictures.transpose(1, 2).flatten(2);
    return std::get<0>(recurrence_->forward(rows))
        .unflatten(2, {3, 32})
        .transpose(1, 2)
        .contiguous();
  }

 private:
  nn::GRU recurrence_{nn::GRUOptions{96, 96}.num_layers(2).dropout(0.2).batch_first(true)};
};

nn::Sequential network(std::int64_t width, bool recurrent) {
  auto convolution = [](std::int64_t in, std::int64_t out) {
    return nn::Conv2d{nn::Conv2dOptions{in, out, 3}.padding(1)};
  };
  nn::Sequential result;
  if (recurrent) {
    result->push_back(std::make_shared<rows_impl>());
  }
  nn::Sequential const layers{convolution(3, width),
                              nn::BatchNorm2d{width},
                              nn::ReLU{},
                              convolution(width, 2 * width),
                              nn::BatchNorm2d{2 * width},
                              nn::ReLU{},
                              nn::AvgPool2d{4},
                              nn::Flatten{},
                              nn::Dropout{0.1},
                              nn::Linear{2 * width * 64, 512},
                              nn::Tanh{},
                              nn::Linear{512, 10}};
  result->extend(*layers);
  return result;
}

/// FNV-1a over the bits of tensors.
class digest {
 public:
  void add(torch::Tensor const& tensor) {
    auto const bytes = tensor.detach().cpu().contiguous();
    for (auto const byte : std::span{static_cast<std::uint8_t const*>(bytes.const_data_ptr()),
                                     static_cast<std::size_t>(bytes.nbytes())}) {
      hash_ = (hash_ ^ byte) * 1099511628211U;
    }
  }
  [[nodiscard]] std::string text() const { return std::to_string(hash_); }

 private:
  std::uint64_t hash_ = 14695981039346656037U;
};

std::string digest_of(nn::Module const& model, torch::optim::Optimizer const& optimizer,
                      at::Generator const& own, std::optional<sluice::grad_scaler> const& scaler) {
  digest result;
  if (scaler) {
    result.add(torch::tensor(scaler->get_scale()));
    result.add(torch::tensor(scaler->get_growth_tracker()));
  }
  for (auto const& list : {model.parameters(), model.buffers()}) {
    for (auto const& tensor : list) {
      result.add(tensor);
      auto const state = optimizer.state().find(tensor.unsafeGetTensorImpl());
      auto const* const adam =
          state == optimizer.state().end()
              ? nullptr
              : dynamic_cast<torch::optim::AdamWParamState const*>(state->second.get());
      if (adam != nullptr) {
        result.add(adam->exp_avg());
        result.add(adam->exp_avg_sq());
      }
    }
  }
  result.add(at::globalContext().defaultGenerator(at::kCPU).get_state());
  if (model.parameters().front().is_cuda()) {
    result.add(at::globalContext().defaultGenerator(at::Device{at::kCUDA, 0}).get_state());
  }
  result.add(own.get_state());
  return result.text();
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(nn::Module const& model,
                                                      std::string const& way) {
  if (way == "lbfgs") {
    return std::make_unique<torch::optim::LBFGS>(
        model.parameters(), torch::optim::LBFGSOptions{0.1}.max_iter(2).history_size(2));
  }
  return std::make_unique<torch::optim::AdamW>(model.parameters(),
                                               torch::optim::AdamWOptions{1e-3});
}

/// As the scaled way of exact_job.py has it: the first step overflows, and every fourth from there on.
sluice::grad_scaler scaler_on(torch::Device device) {
  int const largest = device.is_cuda() ? 24 : 127, change = device.is_cuda() ? 10 : 20;
  return sluice::grad_scaler{{.init_scale = std::ldexp(1.0, largest),
                              .growth_factor = std::ldexp(1.0, change),
                              .backoff_factor = std::ldexp(1.0, -change),
                              .growth_interval = 3}};
}

/// Low precision for as long as it lives.
class autocast {
 public:
  explicit autocast(torch::DeviceType device) : device_{device} {
    at::autocast::set_autocast_dtype(device_, device == at::kCUDA ? at::kHalf : at::kBFloat16);
    at::autocast::set_autocast_enabled(device_, true);
    at::autocast::increment_nesting();
  }
  ~autocast() {
    at::autocast::set_autocast_enabled(device_, false);
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
  }
  autocast(autocast const&) = delete;
  autocast& operator=(autocast const&) = delete;

 private:
  torch::DeviceType device_;
};

json as_json(sluice::step_stats const& stats) {
  return {{"steps", stats.steps},
          {"samples", stats.samples},
          {"commits", stats.commits},
          {"discards", stats.discards},
          {"micro_batch", stats.micro_batch},
          {"wait_seconds", stats.wait_seconds},
          {"discarded_seconds", stats.discarded_seconds}};
}

json train(command_line const& options) {
  torch::Device const device{options.device};
  torch::manual_seed(0);
  auto data = at::make_generator<at::CPUGeneratorImpl>(1);
  auto own = at::make_generator<at::CPUGeneratorImpl>(2);
  auto model = network(options.width, options.recurrent);
  model->to(device);
  auto const optimizer = optimizer_of(*model, options.way);
  std::optional<sluice::grad_scaler> scaler;
  if (options.way == "scaled") {
    scaler = scaler_on(device);
  }
  sluice::step step{model,
                    *optimizer,
                    {.micro_batch = options.micro_batch,
                     .adapt = options.adapt ? std::optional{true} : std::nullopt,
                     .generators = {own},
                     .scaler = scaler,
                     .clip_norm = 1.0}};

  auto loss_of = [&](auto const& slices) {
    auto const& [x, y] = std::pair{slices[0], slices[1]};
    auto const kept = torch::rand(y.sizes(), own).to(device) < 0.9;
    auto const labels = torch::where(kept, y, torch::full_like(y, -100));
    std::optional<autocast> low;
    if (scaler) {
      low.emplace(device.type());
    }
    return std::pair{F::cross_entropy(model->forward(x), labels), kept.sum()};
  };
  std::vector<torch::Tensor> losses;  // read at the end: reading waits for the device
  bool over = false;
  while (!over) {
    auto const x = torch::randn({options.batch, 3, 32, 32}, data).to(device);
    auto const y = torch::randint(10, {options.batch}, data).to(device);
    losses.push_back(step(loss_of, {x, y}));
    over = options.until.empty() ? static_cast<std::int64_t>(losses.size()) == options.steps
                                 : std::filesystem::exists(options.until);
  }
  std::vector<std::uint32_t> bits;
  for (auto const& loss : losses) {
    bits.push_back(std::bit_cast<std::uint32_t>(loss.item<float>()));
  }
  return {{"digest", digest_of(*model, *optimizer, own, scaler)},
          {"losses", bits},
          {"steps", losses.size()},
          {"shared", step.shared()},
          {"stats", as_json(step.stats())},
          {"phases", {{0, "training"}}}};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto const options = parsed(argc, argv);
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);  // read when CUDA starts
    at::globalContext().setDeterministicAlgorithms(true, false);
    at::globalContext().setDeterministicCuDNN(true);
    if (options.device == "cuda") {
      open_torch_cuda();
    }
    auto const learned = train(options);
    std::ofstream{options.out} << learned;
    return 0;
  } catch (std::exception const& why) {
    static_cast<void>(std::fprintf(stderr, "%s\n", why.what()));
    return 1;
  }
}
