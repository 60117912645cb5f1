/// Compressed bodies: gzip and deflate, as RFC 9110 names them (the latter is zlib's format). Pure.
///
///   auto coding = coding_of("gzip");                // of Content-Encoding; nothing: not known
///   auto text = decompressed(body, *coding, 1024);  // nothing: it would be longer
///   auto best = accepted_coding("gzip;q=0.5, *");   // of Accept-Encoding
///   auto sent = compressed(*text, tensors, best);
///
/// Source: RFC 9110 sections 8.4.1 and 12.5.3; Triton compresses the same way.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "runtime/server/inference/tensor_bytes.hpp"

namespace sluice::server {

enum class content_coding { identity, gzip, deflate };

/// Those that are known, as Accept-Encoding lists them.
inline constexpr std::string_view known_codings = "gzip, deflate";

/// Shorter bodies are sent as they are.
inline constexpr std::size_t least_compressed = 512;

[[nodiscard]] std::string_view coding_name(content_coding coding) noexcept;
/// Nothing for what is not known, and for several at once.
[[nodiscard]] std::optional<content_coding> coding_of(std::string_view header) noexcept;
/// The one that a client likes most; of several gzip, and `identity` where it says nothing that is
/// understood.
[[nodiscard]] content_coding accepted_coding(std::string_view header);

/// Is asked before so many bytes of memory are taken, and may throw.
using growth_check = std::function<void(std::uint64_t bytes)>;

/// Nothing if there are more than `most` bytes, of which no more are made then. Throws
/// `invalid_argument` for a stream that is corrupt, does not end, or has something behind its end.
[[nodiscard]] std::optional<std::string> decompressed(std::string_view body, content_coding coding,
                                                      std::uint64_t most,
                                                      growth_check const& on_growth = {});
/// `text` and `tensors` behind it, as one stream.
[[nodiscard]] std::string compressed(std::string_view text, std::span<tensor_bytes const> tensors,
                                     content_coding coding);

}  // namespace sluice::server
