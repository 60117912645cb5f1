#include "runtime/server/http/content_coding.hpp"

#include <fmt/format.h>

#define ZLIB_CONST  // its input is not written to
#include <zlib.h>

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <utility>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

constexpr std::string_view blanks = " \t";

std::string_view trimmed(std::string_view text) {
  auto const begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

std::string lower(std::string_view text) {
  std::string result{text};
  for (auto& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

/// In thousandths; nothing for what is no weight.
std::optional<unsigned> weight_of(std::string_view text) {
  if (text.empty() || text.size() > 5 || (text[0] != '0' && text[0] != '1')) return std::nullopt;
  if (text.size() > 1 && text[1] != '.') return std::nullopt;
  unsigned weight = text[0] == '1' ? 1000 : 0;
  unsigned unit = 100;
  for (std::size_t i = 2; i < text.size(); ++i, unit /= 10) {
    if (text[i] < '0' || text[i] > '9') return std::nullopt;
    weight += static_cast<unsigned>(text[i] - '0') * unit;
  }
  return weight <= 1000 ? std::optional{weight} : std::nullopt;
}

/// "gzip;q=0.5": what is before the semicolon, and how much it is liked.
std::optional<std::pair<std::string, unsigned>> liking_of(std::string_view element) {
  auto const semicolon = element.find(';');
  auto name = lower(trimmed(element.substr(0, semicolon)));
  if (semicolon == std::string_view::npos) return std::pair{std::move(name), 1000U};
  auto const parameter = lower(trimmed(element.substr(semicolon + 1)));
  if (!parameter.starts_with("q=")) return std::nullopt;
  auto const weight = weight_of(std::string_view{parameter}.substr(2));
  if (!weight) return std::nullopt;
  return std::pair{std::move(name), *weight};
}

int window_bits(content_coding coding) {
  constexpr int gzip_header = 16;
  return MAX_WBITS + (coding == content_coding::gzip ? gzip_header : 0);
}

uInt some_of(std::size_t bytes) {
  return static_cast<uInt>(std::min<std::size_t>(bytes, std::numeric_limits<uInt>::max() / 2));
}

Bytef const* as_input(std::string_view bytes) {
  return reinterpret_cast<Bytef const*>(bytes.data());
}

class inflating {
 public:
  explicit inflating(content_coding coding) {
    if (inflateInit2(&stream_, window_bits(coding)) != Z_OK) throw std::bad_alloc{};
  }
  inflating(inflating const&) = delete;
  inflating& operator=(inflating const&) = delete;
  inflating(inflating&&) = delete;
  inflating& operator=(inflating&&) = delete;
  ~inflating() { inflateEnd(&stream_); }

  z_stream& operator*() noexcept { return stream_; }

 private:
  z_stream stream_{};
};

class deflating {
 public:
  explicit deflating(content_coding coding) {
    constexpr int usual_memory = 8;
    // Numbers hardly become smaller by a longer search.
    if (deflateInit2(&stream_, Z_BEST_SPEED, Z_DEFLATED, window_bits(coding), usual_memory,
                     Z_DEFAULT_STRATEGY) != Z_OK) {
      throw std::bad_alloc{};
    }
  }
  deflating(deflating const&) = delete;
  deflating& operator=(deflating const&) = delete;
  deflating(deflating&&) = delete;
  deflating& operator=(deflating&&) = delete;
  ~deflating() { deflateEnd(&stream_); }

  void add(std::string& out, std::string_view part, int flush) {
    do {
      auto const taken = some_of(part.size());
      stream_.next_in = as_input(part);
      stream_.avail_in = taken;
      part.remove_prefix(taken);
      do {
        stream_.next_out = reinterpret_cast<Bytef*>(made_.data());
        stream_.avail_out = static_cast<uInt>(made_.size());
        deflate(&stream_, part.empty() ? flush : Z_NO_FLUSH);
        out.append(made_.data(), made_.size() - stream_.avail_out);
      } while (stream_.avail_out == 0);
    } while (!part.empty());
  }

 private:
  z_stream stream_{};
  std::array<char, std::size_t{16} << 10U> made_{};
};

[[noreturn]] void broken(content_coding coding, std::string_view how) {
  throw error{error_kind::invalid_argument,
              fmt::format("the body is not what its Content-Encoding says: as {} {}",
                          coding_name(coding), how)};
}

}  // namespace

std::string_view coding_name(content_coding coding) noexcept {
  switch (coding) {
    case content_coding::gzip:
      return "gzip";
    case content_coding::deflate:
      return "deflate";
    case content_coding::identity:
      break;
  }
  return "identity";
}

std::optional<content_coding> coding_of(std::string_view header) noexcept {
  auto const name = lower(trimmed(header));
  if (name.empty() || name == "identity") return content_coding::identity;
  if (name == "gzip" || name == "x-gzip") return content_coding::gzip;
  if (name == "deflate") return content_coding::deflate;
  return std::nullopt;
}

content_coding accepted_coding(std::string_view header) {
  std::optional<unsigned> gzip;
  std::optional<unsigned> deflate;
  std::optional<unsigned> identity;
  unsigned others = 0;
  while (true) {
    auto const comma = header.find(',');
    if (auto const liking = liking_of(header.substr(0, comma))) {
      auto const& [name, weight] = *liking;
      if (name == "gzip" || name == "x-gzip") gzip = weight;
      if (name == "deflate") deflate = weight;
      if (name == "identity") identity = weight;
      if (name == "*") others = weight;
    }
    if (comma == std::string_view::npos) break;
    header.remove_prefix(comma + 1);
  }
  auto const of_gzip = gzip.value_or(others);
  auto const of_deflate = deflate.value_or(others);
  // what is not said of it makes it no favourite
  auto const of_identity = identity.value_or(0);
  if (std::max(of_gzip, of_deflate) == 0 || of_identity > std::max(of_gzip, of_deflate)) {
    return content_coding::identity;
  }
  return of_gzip >= of_deflate ? content_coding::gzip : content_coding::deflate;
}

std::optional<std::string> decompressed(std::string_view body, content_coding coding,
                                        std::uint64_t most, growth_check const& on_growth) {
  if (coding == content_coding::identity) return std::string{body};
  constexpr std::size_t least_room = 4096;
  inflating state{coding};
  auto& stream = *state;
  std::string out;
  std::size_t used = 0;
  bool ended = false;
  while (!ended) {
    if (used == out.size()) {
      if (used > most) return std::nullopt;
      // one more than it may be, which shows that it is more
      auto const room = std::min<std::uint64_t>(
          std::max(2 * used, std::max(least_room, 2 * body.size())), most + 1);
      if (on_growth) on_growth(room);
      out.resize(room);
    }
    auto const given = some_of(body.size());
    auto const room = some_of(out.size() - used);
    stream.next_in = as_input(body);
    stream.avail_in = given;
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + used);
    stream.avail_out = room;
    auto const state_now = inflate(&stream, Z_NO_FLUSH);
    body.remove_prefix(given - stream.avail_in);
    used += room - stream.avail_out;
    if (state_now == Z_MEM_ERROR) throw std::bad_alloc{};
    if (state_now == Z_STREAM_END) {
      // gzip's streams may stand one after the other
      ended = body.empty() || coding != content_coding::gzip;
      if (ended && !body.empty()) broken(coding, "it goes on behind its end");
      if (!ended) inflateReset(&stream);
    } else if (state_now == Z_BUF_ERROR ||
               (state_now == Z_OK && body.empty() && stream.avail_out > 0)) {
      if (body.empty()) broken(coding, "it does not end");
    } else if (state_now != Z_OK) {
      broken(coding, fmt::format("it is corrupt{}{}", stream.msg != nullptr ? ": " : "",
                                 stream.msg != nullptr ? stream.msg : ""));
    }
  }
  if (used > most) return std::nullopt;
  out.resize(used);
  return out;
}

std::string compressed(std::string_view text, std::span<tensor_bytes const> tensors,
                       content_coding coding) {
  std::string out;
  deflating state{coding};
  state.add(out, text, tensors.empty() ? Z_FINISH : Z_NO_FLUSH);
  for (auto const& each : tensors) {
    bool const is_last = &each == &tensors.back();
    state.add(out, {reinterpret_cast<char const*>(each.data()), each.size()},
              is_last ? Z_FINISH : Z_NO_FLUSH);
  }
  return out;
}

}  // namespace sluice::server
