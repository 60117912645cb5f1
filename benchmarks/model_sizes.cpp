#include "benchmarks/model_sizes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace sluice::benchmarks {
namespace {

constexpr std::uint64_t largest_convolutional_network = 1ULL << 30U;

double uniform(double from, double to, std::mt19937_64& random) {
  return std::uniform_real_distribution<double>{from, to}(random);
}

double log_uniform(double from, double to, std::mt19937_64& random) {
  return std::exp(uniform(std::log(from), std::log(to), random));
}

std::uint64_t total(tensor_sizes const& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
}

}  // namespace

tensor_sizes convolutional_network(std::uint64_t bytes, std::mt19937_64& random) {
  // Some twenty blocks in all: the width follows from the size.
  auto const blocks = static_cast<double>(12 + random() % 24);
  auto const wanted = static_cast<double>(bytes) * uniform(0.8, 0.97, random);
  // Stage s has width w·2^s, a quarter of the blocks, and 4-byte kernels of three by three.
  auto const base = std::sqrt(wanted / (blocks / 4.0 * 9.0 * 4.0 * (1.0 + 4.0 + 16.0 + 64.0)));
  auto const width = std::max<std::uint64_t>(8, static_cast<std::uint64_t>(base) / 8 * 8);
  tensor_sizes sizes{7ULL * 7 * 3 * width * 4};
  for (std::uint64_t stage = 0; stage < 4; ++stage) {
    auto const channels = width << stage;
    for (int block = 0; block < static_cast<int>(blocks / 4.0); ++block) {
      auto const in = block == 0 && stage > 0 ? channels / 2 : channels;
      sizes.push_back(in * channels * 9 * 4);
      sizes.insert(sizes.end(), 4, channels * 4);
    }
  }
  auto const body = total(sizes);
  sizes.push_back(body < bytes ? bytes - body : 4000);
  return sizes;
}

tensor_sizes transformer(std::uint64_t bytes, std::mt19937_64& random) {
  constexpr std::array<std::uint64_t, 9> widths{512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120};
  constexpr double least_layers = 4.0;
  auto const inner = random() % 2 == 0 ? 4.0 : 8.0 / 3.0;
  auto const layer_bytes = [&](std::uint64_t width) {
    return 2.0 * static_cast<double>(width * width) * (4.0 + 3.0 * inner);
  };
  // The widest few that still have some layers.
  std::size_t fits = 0;
  while (fits + 1 < widths.size() &&
         layer_bytes(widths.at(fits + 1)) * least_layers < 0.8 * static_cast<double>(bytes)) {
    ++fits;
  }
  auto const width = widths.at(fits - std::min<std::size_t>(fits, random() % 3));
  auto const layers = static_cast<int>(0.85 * static_cast<double>(bytes) / layer_bytes(width));
  auto const square = width * width * 2;
  auto const wide = static_cast<std::uint64_t>(static_cast<double>(square) * inner) / 256 * 256;
  tensor_sizes sizes;
  for (int layer = 0; layer < std::max(1, layers); ++layer) {
    sizes.insert(sizes.end(), 4, square);
    sizes.insert(sizes.end(), 3, wide);
    sizes.insert(sizes.end(), 2, width * 2);
  }
  auto const body = total(sizes);
  sizes.push_back(body < bytes ? bytes - body : width * 2000);
  return sizes;
}

tensor_sizes language_model(std::uint64_t bytes) {
  constexpr double width_per_layer = 128.0;
  constexpr std::uint64_t rows = 50257;
  // 24 bytes a layer for each element of a square as wide as the model.
  auto const depth =
      std::cbrt(static_cast<double>(bytes) / (24.0 * width_per_layer * width_per_layer));
  auto const width = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(std::lround(depth))) *
                     static_cast<std::uint64_t>(width_per_layer);
  auto const square = width * width * 2;
  tensor_sizes const layer{3 * square, square,    4 * square, 4 * square,
                           width * 2,  width * 2, width * 2,  width * 2};
  tensor_sizes sizes;
  if (auto const embedding = rows * width * 2; embedding <= bytes / 2) {
    sizes.push_back(embedding);
  }
  auto left = bytes - total(sizes);
  while (left >= total(layer)) {
    sizes.insert(sizes.end(), layer.begin(), layer.end());
    left -= total(layer);
  }
  for (; left > 0; left -= sizes.back()) {
    sizes.push_back(std::min(left, square));
  }
  return sizes;
}

tensor_sizes embedding_tables(std::uint64_t bytes, std::mt19937_64& random) {
  auto const tables = 2 + random() % 11;
  std::vector<double> shares(tables);
  for (auto& each : shares) {
    each = log_uniform(0.01, 1.0, random);
  }
  auto const all = std::accumulate(shares.begin(), shares.end(), 0.0);
  tensor_sizes sizes;
  for (auto const each : shares) {
    auto const rows =
        static_cast<std::uint64_t>(0.98 * static_cast<double>(bytes) * each / all) / 512;
    sizes.push_back(std::max<std::uint64_t>(rows, 1) * 512);
  }
  for (auto left = bytes - std::min(bytes, total(sizes)); left > 0;) {
    auto const layer = std::min<std::uint64_t>(left, 4ULL << (8 + random() % 15));
    sizes.push_back(layer);
    left -= layer;
  }
  return sizes;
}

std::vector<tensor_sizes> catalogue(int models, std::uint64_t least, std::uint64_t most,
                                    std::mt19937_64& random) {
  std::vector<tensor_sizes> made;
  for (int i = 0; i < models; ++i) {
    auto const bytes = static_cast<std::uint64_t>(
        log_uniform(static_cast<double>(least), static_cast<double>(most), random));
    auto const family = random() % 3;
    if (family == 0 && bytes <= largest_convolutional_network) {
      made.push_back(convolutional_network(bytes, random));
    } else if (family <= 1) {
      made.push_back(transformer(bytes, random));
    } else {
      made.push_back(embedding_tables(bytes, random));
    }
  }
  return made;
}

}  // namespace sluice::benchmarks
