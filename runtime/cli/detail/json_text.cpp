#include "runtime/cli/detail/json_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "memhandover/base/bytes.hpp"

namespace sluice::cli::detail {

using nlohmann::json;

json const& field(json const& object, std::string_view name) {
  static json const missing;
  if (!object.is_object()) {
    return missing;
  }
  auto const found = object.find(name);
  return found == object.end() ? missing : *found;
}

std::string plain(json const& value) {
  if (value.is_null()) {
    return nothing;
  }
  if (value.is_string()) {
    auto const text = value.get<std::string>();
    return text.empty() ? nothing : text;
  }
  if (value.is_number_float()) {
    return fmt::format("{:.4g}", value.get<double>());
  }
  return value.dump();
}

std::string bytes(json const& value) {
  if (!value.is_number() || value.get<double>() < 0) {
    return plain(value);
  }
  return format_bytes(value.is_number_float() ? static_cast<std::uint64_t>(value.get<double>())
                                              : value.get<std::uint64_t>());
}

std::string milliseconds_of_us(json const& value) {
  return value.is_number() ? fmt::format("{:.3f} ms", value.get<double>() / 1000.0) : plain(value);
}

std::string milliseconds(json const& value) {
  return value.is_number() ? fmt::format("{:.3f} ms", value.get<double>()) : plain(value);
}

std::string table(std::vector<row> const& rows) {
  std::vector<std::size_t> widths;
  for (auto const& cells : rows) {
    widths.resize(std::max(widths.size(), cells.size()));
    for (std::size_t i = 0; i < cells.size(); ++i) {
      widths[i] = std::max(widths[i], cells[i].size());
    }
  }
  std::string text;
  for (auto const& cells : rows) {
    std::string line;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      line += fmt::format("  {:<{}}", cells[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string place(json const& pool) {
  auto const backend = plain(field(pool, "backend"));
  auto const& device = field(pool, "device");
  bool const is_first_on_host =
      backend == "host" && (!device.is_number() || device.get<int>() <= 0);
  return backend == nothing || is_first_on_host ? backend : backend + " device " + plain(device);
}

std::string pool_line(json const& pool) {
  return fmt::format("pool {}: {} in {} chunks of {}, backend {}, written by the {}\n",
                     plain(field(pool, "id")), bytes(field(pool, "bytes")),
                     plain(field(pool, "chunks")), bytes(field(pool, "chunk_bytes")), place(pool),
                     plain(field(pool, "writer")));
}

std::string host_copies_line(json const& pool) {
  auto const& copies = field(pool, "host_copies");
  if (!copies.is_object()) {
    return "";
  }
  auto const& warning = field(copies, "warning");
  bool const has_none = field(copies, "bytes") == 0;
  auto const& disk = field(copies, "disk");
  return fmt::format(
      "host copies: {}{}{}\n",
      has_none ? "none"
               : fmt::format("{}, {} free, {} of it present", bytes(field(copies, "bytes")),
                             bytes(field(copies, "free_bytes")),
                             bytes(field(copies, "populated_bytes"))),
      disk.is_object() ? fmt::format("; on disk {}, {} free", bytes(field(disk, "bytes")),
                                     bytes(field(disk, "free_bytes")))
                       : "",
      warning.is_string() ? "; " + plain(warning) : "");
}

json several(json const& pools) {
  auto const& list = field(pools, "pools");
  return list.is_array() && !list.empty() ? list : json::array({pools});
}

}  // namespace sluice::cli::detail
