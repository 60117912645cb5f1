/// The environment of a process to be started, as a value.
///
///   auto env = environment::of_this_process();
///   env.set("SLUICE_RUN", "1");
///   env.append("LD_PRELOAD", "/opt/sluice/lib/libsluice_gate.so");   // behind the user's own
///   ::execvpe(name, argv, env.pointers().data());
///
/// Plain value: one thread at a time.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::launcher {

class environment {
 public:
  environment() = default;
  /// Entries as `NAME=value`.
  explicit environment(std::vector<std::string> entries) : entries_(std::move(entries)) {}
  [[nodiscard]] static environment of_this_process();

  [[nodiscard]] std::optional<std::string> get(std::string_view name) const;
  void set(std::string_view name, std::string_view value);
  void unset(std::string_view name);
  /// Puts `element` in front of a list separated by colons, or behind it; not a second time.
  void prepend(std::string_view name, std::string_view element);
  void append(std::string_view name, std::string_view element);
  /// Takes `element` out of a list separated by colons.
  void remove(std::string_view name, std::string_view element);

  [[nodiscard]] std::vector<std::string> const& entries() const noexcept { return entries_; }
  /// For `exec`: ends with a null pointer; valid until this object changes.
  [[nodiscard]] std::vector<char*> pointers();

 private:
  std::vector<std::string> entries_;
};

}  // namespace sluice::launcher
