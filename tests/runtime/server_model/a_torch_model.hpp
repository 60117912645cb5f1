/// A TorchScript model of a test, and memory to lend it.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/csrc/jit/api/module.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/torch/model/torch_model.hpp"

namespace sluice::server::testing {

/// Pages that can be taken away, as a pool's can. Each piece of a model begins a page, the last one
/// first, so that none lies where it would in one block.
class lent_memory {
 public:
  explicit lent_memory(hosted_model const& model) {
    constexpr std::uint64_t page = 4096;
    auto const pieces = model.pieces();
    std::vector<std::uint64_t> offsets(pieces.size());
    for (auto i = pieces.size(); i-- > 0;) {
      offsets[i] = bytes_;
      bytes_ += (pieces[i] + page - 1) / page * page;
    }
    bytes_ = std::max(bytes_, page);
    data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (auto const offset : offsets) {
      addresses_.push_back(data() + offset);
    }
  }
  lent_memory(lent_memory const&) = delete;
  lent_memory& operator=(lent_memory const&) = delete;
  ~lent_memory() { ::munmap(data_, bytes_); }

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  [[nodiscard]] std::vector<std::byte*> const& addresses() const { return addresses_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  /// From now on whoever reaches in ends the process.
  void forbid() { ::mprotect(data_, bytes_, PROT_NONE); }

 private:
  std::uint64_t bytes_ = 0;
  void* data_ = nullptr;
  std::vector<std::byte*> addresses_;
};

inline tensor floats(std::string name, std::vector<std::int64_t> shape,
                     std::vector<float> const& values) {
  tensor made{std::move(name), datatype::fp32, std::move(shape),
              std::vector<std::byte>(values.size() * 4)};
  std::memcpy(made.data.data(), values.data(), made.data.size());
  return made;
}

inline std::vector<float> values_of(tensor const& from) {
  std::vector<float> values(from.data.size() / 4);
  std::memcpy(values.data(), from.data.data(), from.data.size());
  return values;
}

/// A model file made from TorchScript source, and what the server makes of it.
class a_torch_model : public ::testing::Test {
 protected:
  a_torch_model() : module_("test") {
    options_ = {"test",
                ::testing::TempDir() + "sluice-" + std::to_string(::getpid()) + ".pt",
                {{"x", datatype::fp32, {-1, 3}}},
                {{"y", datatype::fp32, {-1, 3}}},
                {}};
  }
  ~a_torch_model() override { std::filesystem::remove(options_.file); }

  void parameter(std::string const& name, at::Tensor const& value) {
    module_.register_parameter(name, value, false);
  }

  std::unique_ptr<hosted_model> prepare(std::string const& source) {
    module_.define(source + "\n");  // the parser wants a last line that is ended
    module_.save(options_.file.string());
    return prepare_torch_model(options_);
  }

  static std::vector<tensor> run(hosted_model& model, std::vector<float> const& x) {
    std::vector<tensor> inputs{floats("x", {static_cast<std::int64_t>(x.size()) / 3, 3}, x)};
    return model.run(inputs, {});
  }

  static std::optional<error> failure(hosted_model& model, std::vector<tensor> inputs,
                                      std::vector<std::string> const& wanted = {}) {
    try {
      (void)model.run(inputs, wanted);
    } catch (error const& thrown) {
      return thrown;
    }
    return std::nullopt;
  }

  torch::jit::Module module_;
  torch_model_options options_;
};

using values = std::vector<float>;

}  // namespace sluice::server::testing
