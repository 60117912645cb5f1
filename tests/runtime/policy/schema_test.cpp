#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <string>

#include "runtime/policy/policy.hpp"

namespace sluice::policy {
namespace {

using json = nlohmann::ordered_json;

TEST(schema, the_shipped_file_is_what_the_program_prints) {
  std::ifstream file{SHIPPED_SCHEMA};
  ASSERT_TRUE(file.is_open()) << SHIPPED_SCHEMA;
  auto const shipped = json::parse(file);
  EXPECT_EQ(shipped, schema())
      << "write the new one with `sluice policy schema > runtime/policy/policy.schema.json`";
}

/// Calls `visit` with the path and the schema of every key that is not itself a section or a list.
void each_value(json const& object, std::string const& path,
                std::function<void(std::string const&, json const&)> const& visit) {
  for (auto const& [name, entry] : object.at("properties").items()) {
    auto const inner = path.empty() ? name : path + "." + name;
    if (entry.contains("properties")) {
      each_value(entry, inner, visit);
    } else if (entry.contains("items") && entry.at("items").contains("properties")) {
      each_value(entry.at("items"), inner + "[0]", visit);
    } else {
      visit(inner, entry);
    }
  }
}

/// A policy that is valid but for what `change` does to it, as JSON, which is YAML too.
std::string policy_with(std::function<void(json&)> const& change) {
  json document{{"version", 1},
                {"models", json::array({{{"name", "resnet"}, {"slo", {{"latency", "150ms"}}}}})}};
  change(document);
  return document.dump();
}

/// The same with an engine, for a key of one.
std::string policy_for(std::string const& path, std::function<void(json&)> const& change) {
  return policy_with([&](json& document) {
    if (path.find(".engine.") != std::string::npos) {
      document["models"][0]["engine"] = {{"command", {"server"}}, {"routes", {"/v1/*"}}};
    }
    change(document);
  });
}

/// The place of a path such as "models[0].slo.latency" in a document.
json& at_path(json& document, std::string path) {
  std::string pointer;
  for (std::size_t i; (i = path.find_first_of(".[]")) != std::string::npos;
       path = path.substr(i + 1)) {
    if (i > 0) {
      pointer += "/" + path.substr(0, i);
    }
  }
  return document[json::json_pointer{path.empty() ? pointer : pointer + "/" + path}];
}

TEST(schema, every_default_is_a_value_that_the_parser_takes) {
  int seen = 0;
  each_value(schema(), "", [&seen](std::string const& path, json const& entry) {
    if (!entry.contains("default")) {
      return;
    }
    ++seen;
    auto const text =
        policy_for(path, [&](json& document) { at_path(document, path) = entry["default"]; });
    EXPECT_NO_THROW((void)parse(text, "p.yaml")) << text;
  });
  EXPECT_GT(seen, 15);
}

TEST(schema, every_key_is_known_to_the_parser_and_no_other) {
  each_value(schema(), "", [](std::string const& path, json const& entry) {
    // An empty list is a value of no key, so the parser must complain of the key's value, not of the key.
    auto const text = policy_for(path, [&](json& document) {
      document["server"]["tls"] = {{"certificate_file", "cert.pem"}, {"key_file", "key.pem"}};
      at_path(document, path) = json::array();
    });
    try {
      (void)parse(text, "p.yaml");
      ADD_FAILURE() << path << " takes a list";
    } catch (policy_error const& wrong) {
      ASSERT_EQ(wrong.problems().size(), 1U) << wrong.what();
      EXPECT_EQ(wrong.problems().front().path, path);
      auto const* const what = entry.contains("items") ? "is an empty list"
                               : entry.contains("propertyNames")
                                   ? "is a list, must be a section"
                                   : "is a list, must be a single value";
      EXPECT_NE(wrong.problems().front().message.find(what), std::string::npos) << wrong.what();
    }
  });
}

TEST(schema, what_the_schema_requires_the_parser_requires) {
  auto const whole = schema();
  for (auto const& name : whole.at("required")) {
    auto const text = policy_with([&](json& document) { document.erase(name.get<std::string>()); });
    try {
      (void)parse(text, "p.yaml");
      ADD_FAILURE() << name << " may be left out";
    } catch (policy_error const& wrong) {
      EXPECT_EQ(wrong.problems().front().path, name.get<std::string>());
      EXPECT_EQ(wrong.problems().front().message.rfind("is missing", 0), 0U) << wrong.what();
    }
  }
}

}  // namespace
}  // namespace sluice::policy
