/// Models as the sizes of their tensors: families whose shapes follow their architecture, sized to a
/// wanted total.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace sluice::benchmarks {

using tensor_sizes = std::vector<std::uint64_t>;

/// Convolutions in four stages of doubling width, four small tensors of batch normalisation behind
/// each, and a classifier that has what is left: hundreds of tensors from 256 bytes up.
[[nodiscard]] tensor_sizes convolutional_network(std::uint64_t bytes, std::mt19937_64& random);

/// 16-bit weights of equal layers (query, key, value, output, a gated network of two and two thirds
/// to four times the width, two small norms), with an embedding that has what is left.
[[nodiscard]] tensor_sizes transformer(std::uint64_t bytes, std::mt19937_64& random);

/// 16-bit weights of a language model whose width grows with its depth (128 a layer, as GPT-3's about
/// do), `bytes` in all: equal layers (query, key and value in one, output, two of four times the width,
/// four small ones), and an embedding of 50 257 rows where there is room. The same for each size.
[[nodiscard]] tensor_sizes language_model(std::uint64_t bytes);

/// Two to twelve tables, log-uniform in size, which hold nearly everything, and small dense layers.
[[nodiscard]] tensor_sizes embedding_tables(std::uint64_t bytes, std::mt19937_64& random);

/// Models with totals log-uniform in [least, most], of a random family each; above 1 GiB there are no
/// convolutional networks.
[[nodiscard]] std::vector<tensor_sizes> catalogue(int models, std::uint64_t least,
                                                  std::uint64_t most, std::mt19937_64& random);

}  // namespace sluice::benchmarks
