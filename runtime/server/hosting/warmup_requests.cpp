#include "runtime/server/hosting/warmup_requests.hpp"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

using bytes = std::vector<std::byte>;

template <typename Value>
void append(bytes& to, Value value) {
  auto const* const first = reinterpret_cast<std::byte const*>(&value);
  to.insert(to.end(), first, first + sizeof value);
}

class random_elements {
 public:
  void add(bytes& to, datatype type) {
    switch (type) {
      case datatype::fp16:
        return append(to, half_from_double(real()));
      case datatype::bf16:
        return append(to, bfloat16_from_double(real()));
      case datatype::fp32:
        return append(to, static_cast<float>(real()));
      case datatype::fp64:
        return append(to, real());
      case datatype::bytes:
        append(to, std::uint32_t{1});
        return append(to, static_cast<char>('a' + bits_() % 26));
      default:
        // Little-endian: the lowest byte comes first.
        to.push_back(static_cast<std::byte>(bits_() % 2));
        to.resize(to.size() + element_size(type) - 1);
    }
  }

 private:
  double real() { return std::uniform_real_distribution{}(bits_); }

  std::mt19937 bits_{20};  // NOLINT(bugprone-random-generator-seed): the same each time
};

std::uint64_t elements_of(warmup_input const& input) {
  std::uint64_t count = 1;
  for (auto const dimension : input.shape) {
    count *= static_cast<std::uint64_t>(dimension);
  }
  return count;
}

bytes read(warmup_input const& input) {
  std::ifstream file{input.file, std::ios::binary};
  bytes data(input.type == datatype::bytes ? std::filesystem::file_size(input.file) : input.bytes);
  file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
  if (!file || static_cast<std::size_t>(file.gcount()) != data.size()) {
    throw error{error_kind::unavailable,
                fmt::format("{} cannot be read, or has fewer than the {} bytes of input '{}'",
                            input.file.string(), data.size(), input.name)};
  }
  return data;
}

bytes one_sample(warmup_input const& input, random_elements& random) {
  static_assert(std::endian::native == std::endian::little);
  auto const count = elements_of(input);
  bytes data;
  switch (input.data) {
    case warmup_input::source::file:
      return read(input);
    case warmup_input::source::zeros:
      // A text of no letters is its length alone.
      data.resize(input.type == datatype::bytes ? count * sizeof(std::uint32_t) : input.bytes);
      break;
    case warmup_input::source::random:
      for (std::uint64_t i = 0; i < count; ++i) {
        random.add(data, input.type);
      }
      break;
  }
  return data;
}

tensor tensor_of(warmup_input const& input, std::optional<std::int64_t> batch_size,
                 random_elements& random) {
  auto const sample = one_sample(input, random);
  auto shape = input.shape;
  bytes all;
  for (std::int64_t i = 0; i < batch_size.value_or(1); ++i) {
    all.insert(all.end(), sample.begin(), sample.end());
  }
  if (batch_size) {
    shape.insert(shape.begin(), *batch_size);
  }
  return {input.name, input.type, std::move(shape), std::move(all)};
}

}  // namespace

std::vector<infer_request> warmup_requests(std::vector<warmup_sample> const& samples,
                                           bool has_batches) {
  std::vector<infer_request> requests;
  for (auto const& sample : samples) {
    infer_request made;
    random_elements random;
    for (auto const& input : sample.inputs) {
      made.inputs.push_back(
          tensor_of(input, has_batches ? std::optional{sample.batch_size} : std::nullopt, random));
    }
    made.is_alone = true;
    requests.insert(requests.end(), sample.count, made);
  }
  return requests;
}

}  // namespace sluice::server
