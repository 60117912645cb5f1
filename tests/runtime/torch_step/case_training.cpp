#include "tests/runtime/torch_step/case_training.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "tests/runtime/torch_step/lost_memory.hpp"
#include "tests/runtime/torch_step/scripted_runtime.hpp"

namespace sluice::testing {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using nlohmann::json;

nn::Sequential model_of(std::string const& kind) {
  if (kind == "batch norm") {
    return nn::Sequential{nn::Linear{4, 6}, nn::BatchNorm1d{6}, nn::Tanh{}, nn::Linear{6, 3}};
  }
  if (kind == "dropout") {
    return nn::Sequential{nn::Linear{4, 6}, nn::Tanh{}, nn::Dropout{0.3}, nn::Linear{6, 3}};
  }
  if (kind == "sparse") {
    return nn::Sequential{nn::Embedding{nn::EmbeddingOptions{10, 3}.sparse(true)}};
  }
  return nn::Sequential{nn::Linear{4, 3}};
}

/// An optimizer of which nobody knows what its step does on the host.
class users final : public torch::optim::SGD {
 public:
  using SGD::SGD;
};

/// Calls no closure.
class idle final : public torch::optim::SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure /*closure*/) override { return {}; }
};

std::unique_ptr<torch::optim::Optimizer> optimizer_for(std::string const& kind,
                                                       std::vector<torch::Tensor> const& params) {
  namespace optim = torch::optim;
  if (kind == "adamw") {
    return std::make_unique<optim::AdamW>(params, optim::AdamWOptions{0.05});
  }
  if (kind == "lbfgs") {
    return std::make_unique<optim::LBFGS>(params, optim::LBFGSOptions{0.5}.max_iter(2));
  }
  if (kind == "user's") {
    return std::make_unique<users>(params, optim::SGDOptions{0.1});
  }
  if (kind == "idle") {
    return std::make_unique<idle>(params, optim::SGDOptions{0.1});
  }
  return std::make_unique<optim::SGD>(params, optim::SGDOptions{0.1}.momentum(0.9));
}

grad_scaler scaler_of(json const& of) {
  grad_scaler_options options;
  options.init_scale = of.value("init_scale", options.init_scale);
  options.growth_interval = of.value("growth_interval", options.growth_interval);
  options.backoff_factor = of.value("backoff_factor", options.backoff_factor);
  return grad_scaler{options};
}

std::vector<torch::Tensor> copies(std::vector<torch::Tensor> const& tensors) {
  std::vector<torch::Tensor> result;
  for (auto const& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

/// What a loss function throws before it has done anything, by what the case says that it does.
void throw_if_asked(std::string const& does) {
  if (does == "raise") {
    throw own_error{};
  }
  TORCH_CHECK(does != "raise torch's error", "torch's own");
  TORCH_CHECK(does != "raise another of torch's", "another of torch's");
  TORCH_CHECK(does != "raise a fault", "CUDA error: an illegal memory access was encountered");
  TORCH_CHECK_WITH(OutOfMemoryError, does != "raise torch's out of memory", "no more");
}

}  // namespace

case_training::case_training(json const& of, bool shared)
    : case_(of), shared_{shared}, kind_{of.value("model", "linear")} {
  torch::manual_seed(5);
  model_ = model_of(kind_);
  other_ = nn::Linear{2, 2};
  auto const optimizes = of.value("optimizes", "");
  optimizer_ =
      optimizer_for(of.value("optimizer", "sgd"),
                    optimizes == "another model" ? other_->parameters() : model_->parameters());
  for (auto& param : model_->parameters()) {
    param.requires_grad_(optimizes != "nothing");
  }
  the_script().inherited = !shared;
  step_ = std::make_unique<step>(model_, *optimizer_, options_of_case());
  the_script().inherited = false;
  weights_ = copies(model_->parameters());
  if (shared) {
    the_script().before_call = [this] { see(); };
  }
}

step_options case_training::options_of_case() {
  auto const of = case_.value("step", json::object());
  step_options result;
  auto const take = [&of](char const* name, auto& into) {
    using value = typename std::remove_reference_t<decltype(into)>::value_type;
    if (of.contains(name)) {
      into = of[name].get<value>();
    }
  };
  take("micro_batch", result.micro_batch);
  take("adapt", result.adapt);
  take("clip_norm", result.clip_norm);
  take("closure", result.closure);
  if (of.contains("scaler")) {
    result.scaler = scaler_ = scaler_of(of["scaler"]);
  }
  result.reduction = of.value("reduction", "mean") == "sum" ? reduction::sum : reduction::mean;
  return result;
}

step::tensors case_training::batch(std::size_t number) const {
  auto const samples = case_["batches"][number].get<std::int64_t>();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(number + 1);
  auto const x = torch::randn({samples, 4}, generator);
  auto const y = torch::randint(3, {samples}, generator);
  if (kind_ == "sparse") {
    return {torch::arange(samples).remainder(10), y};
  }
  return {x.to(model_->parameters()[0].dtype()), y};
}

/// The optimizer has run, if weights are others, or would be, had its launches not been dropped.
void case_training::see() {
  auto const params = model_->parameters();
  auto const dropped = dropped_writes();
  bool ran = false;
  for (std::size_t i = 0; i < params.size(); ++i) {
    ran = ran || !torch::equal(params[i], weights_[i]) || dropped.contains(params[i].data_ptr());
  }
  if (ran) {
    weights_ = copies(params);
    the_script().sequence.emplace_back("optimizer");
  }
}

void case_training::change(std::string const& what) {
  if (what == "make it double") {
    model_->to(torch::kDouble);
  } else {
    for (auto& param : model_->children()[0]->parameters()) {
      param.requires_grad_(what == "thaw the first layer");
    }
  }
}

void case_training::train(std::size_t number) {
  auto const changes = case_.value("between", json::object());
  if (auto const key = std::to_string(number); changes.contains(key)) {
    change(changes[key]);
    weights_ = copies(model_->parameters());
  }
  losses_.push_back((*step_)([this](auto const& slices) { return loss(slices); }, batch(number)));
  if (shared_) {
    see();
  }
}

slice_loss case_training::loss(step::tensors const& slices) {
  auto const does =
      shared_ ? case_.value("does", json::object()).value(std::to_string(runs_), "") : "";
  ++runs_;
  throw_if_asked(does);
  if (does == "run a step") {
    (*step_)([this](auto const& inner) { return loss(inner); }, slices);
  }
  auto const how = case_.value("loss", "mean");
  if (how == "thawing") {
    change("thaw the first layer");
  }
  auto const output = model_->forward(slices[0]);
  F::CrossEntropyFuncOptions options;
  if (how == "sum") {
    options.reduction(torch::kSum);
  }
  options.ignore_index(how == "weighted" ? 0 : -100);
  auto loss = F::cross_entropy(output, slices[1], options);
  loss = disturbed(does, how == "huge" ? loss * 100 : loss, output);
  std::string const weigh = "weigh ";
  if (does.starts_with(weigh)) {
    return std::pair{loss, std::stod(does.substr(weigh.size()))};
  }
  if (how == "weighted") {
    return std::pair{loss, slices[1].ne(0).sum()};
  }
  return loss;
}

torch::Tensor case_training::disturbed(std::string const& does, torch::Tensor loss,
                                       torch::Tensor const& output) {
  if (does == "lose memory" || does == "lose memory and raise") {
    the_script().lose(SLUICE_ARENA_REVOKED);
  } else if (does == "starve and raise") {
    the_script().lose(SLUICE_ARENA_STARVED);
  } else if (does == "lose memory in backward") {
    output.register_hook([](torch::Tensor const&) { the_script().lose(SLUICE_ARENA_REVOKED); });
  } else if (does == "lose memory and raise in backward") {
    output.register_hook([](torch::Tensor const&) -> void {
      the_script().lose(SLUICE_ARENA_REVOKED);
      throw own_error{};
    });
  } else if (does == "keep its output") {
    kept_.push_back(output);
  } else if (does == "run backward") {
    loss.backward();
  } else if (does == "run backward and keep the graph") {
    loss.backward({}, /*keep_graph=*/true);
  } else if (does == "run backward for another loss") {
    auto other = torch::zeros({});
    for (auto const& param : model_->parameters()) {
      other = other + param.square().sum();
    }
    (other * 0).backward();
  } else if (does == "detach") {
    return loss.detach();
  } else if (does == "return a vector") {
    return loss.expand({2});
  }
  if (does.ends_with("and raise")) {
    throw own_error{};
  }
  return loss;
}

std::vector<torch::Tensor> case_training::learned() const {
  auto result = copies(model_->parameters());
  for (auto const& list : {copies(model_->buffers()), losses_}) {
    result.insert(result.end(), list.begin(), list.end());
  }
  if (step_->grad_norm()) {
    result.push_back(torch::tensor(*step_->grad_norm(), torch::kDouble));
  }
  if (scaler_) {
    result.push_back(torch::tensor(scaler_->get_scale(), torch::kDouble));
    result.push_back(torch::tensor(scaler_->get_growth_tracker()));
  }
  result.push_back(torch::rand({2}));
  return result;
}

bool case_training::has_gradients() const {
  return std::ranges::all_of(model_->parameters(),
                             [](auto const& param) { return param.grad().defined(); });
}

json case_training::stats() const {
  auto const now = step_->stats();
  return {{"steps", now.steps},
          {"samples", now.samples},
          {"commits", now.commits},
          {"discards", now.discards},
          {"micro_batch", now.micro_batch}};
}

}  // namespace sluice::testing
