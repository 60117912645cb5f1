#include "runtime/torch/model/rehearsal.hpp"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <memory>
#include <optional>
#include <vector>

#include "runtime/server/hosting/torch_errors.hpp"
#include "runtime/torch/model/detail/torch_tensors.hpp"

namespace sluice::server {
namespace {

constexpr std::int64_t side = 32, channels = 4;

/// A convolution and what follows it, a product and what stands around it in attention; a loop, a list and a tuple.
constexpr char const* program = R"(
def rehearse(image: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tuple[Tensor, Tensor]:
    x = torch.conv2d(image, kernel, bias, [1, 1], [1, 1])
    x = torch.batch_norm(x, None, None, bias, bias, True, 0.1, 0.00001, False)
    x = torch.relu(x)
    x = torch.max_pool2d(x, [2, 2])
    x = torch.flatten(x, 1).reshape([-1, 32])
    y = torch.embedding(weight, ids)
    parts: List[Tensor] = []
    for i in range(2):
        y = torch.layer_norm(y @ weight + weight[i], [32])
        y = torch.gelu(torch.addmm(weight[i], y, weight.t()))
        parts.append(torch.softmax(y, -1))
    z = torch.cat(parts, 0).unsqueeze(0)
    z = torch.scaled_dot_product_attention(z, z, z)
    z = torch.sigmoid(torch.tanh(z)) * 2.0 - torch.bmm(z, z.transpose(1, 2)).sum(2, True)
    w = torch.linear(x, weight)
    return torch.argmax(z, -1).reshape([-1]), w.reshape([-1]).float()
)";

std::vector<tensor_spec> specs(std::initializer_list<std::pair<char const*, datatype>> of) {
  std::vector<tensor_spec> made;
  for (auto const& [name, type] : of) {
    made.push_back({name, type, {-1}});
  }
  return made;
}

/// Once for all threads.
torch::jit::Function& compiled() {
  static auto const unit = [] {
    auto made = std::make_unique<torch::jit::CompilationUnit>();
    made->define(std::nullopt, program, torch::jit::nativeResolver(), nullptr);
    return made;
  }();
  return unit->get_function("rehearse");
}

void compute(at::Device device) {
  c10::InferenceMode const inference;
  torch::jit::GraphOptimizerEnabledGuard const unoptimised{false};
  auto const numbers = at::TensorOptions{device}.dtype(at::kFloat);
  torch::jit::Stack stack{at::ones({1, channels, side, side}, numbers),
                          at::ones({channels, channels, 3, 3}, numbers), at::eye(side, numbers),
                          at::ones({channels}, numbers),
                          at::arange(side, numbers.dtype(at::kLong))};
  compiled().run(stack);
  // Its results on the host, as an answer's are; so all of it has been done.
  std::vector<tensor> no_inputs;
  std::vector<std::string> const all_outputs;
  model_call call{no_inputs, all_outputs};
  detail::from_result(stack.back(), specs({{"best", datatype::int64}, {"all", datatype::fp32}}),
                      {0, 1}, {&call, 1});
}

}  // namespace

void rehearse(torch_device device) {
  auto const on = device.is_cuda()
                      ? at::Device{at::kCUDA, static_cast<at::DeviceIndex>(device.cuda_ordinal)}
                      : at::Device{at::kCPU};
  try {
    c10::OptionalDeviceGuard const here{on.is_cpu() ? std::nullopt : std::optional{on}};
    compute(on);
  } catch (...) {
    rethrow_as_error("computing something small", error_kind::internal);
  }
}

}  // namespace sluice::server
