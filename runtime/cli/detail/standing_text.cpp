#include "runtime/cli/detail/standing_text.hpp"

#include <vector>

#include "runtime/cli/detail/json_text.hpp"

namespace sluice::cli::detail {

using nlohmann::json;

std::string standing_text(json const& clients) {
  std::vector<row> rows{{"slot", "name", "priority", "minimum", "bytes"}};
  bool is_usual = true;
  for (auto const& client : clients.is_array() ? clients : json::array()) {
    auto const& priority = field(client, "priority");
    auto const& least = field(client, "min_bytes");
    if (priority.is_string()) {
      is_usual = is_usual && priority == json("normal") && least == json(0);
      rows.push_back({plain(field(client, "slot")), plain(field(client, "name")), plain(priority),
                      bytes(least), bytes(field(client, "bytes"))});
    }
  }
  return is_usual ? std::string{} : "priorities\n" + table(rows);
}

}  // namespace sluice::cli::detail
