/// The file in which a server leaves what it has learnt of its models to the one that comes after it, however it ends.
///
///   experience_file left{"/run/user/1000/sluice/models-0.experience"};   // by the one before
///   if (auto const found = left.find("resnet/1", stands_for)) {
///     controller.recall(found->learnt, found->age, now);
///   }
///   if (left.is_due(now)) {
///     left.keep(all);   // written by a thread that gives way to all others
///   }
///
/// The file is replaced as a whole, so that there is one whenever the process is killed. What is damaged, of another version, or no
/// file at all counts as nothing, and a line of the log says so; one that is not there is no fault.
///
/// Writing takes at most a hundredth of a core: with many models it happens ever more rarely. `find` may be called from any thread;
/// `is_due` and `keep` from one at a time. No member throws, or waits for the disk, but the constructor and the destructor, which
/// writes what is left to be written.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/server/experience/experience_text.hpp"

namespace sluice::server {

class experience_file {
 public:
  using clock = std::chrono::steady_clock;
  /// What is larger is not read.
  static constexpr std::uintmax_t most_bytes = std::uintmax_t{256} << 20U;

  struct found {
    scheduler::experience const& learnt;
    scheduler::seconds age;  ///< since it was written down; not below zero, whatever clocks say
  };

  /// `pause`: at least so long between two times of writing.
  explicit experience_file(std::filesystem::path path,
                           std::chrono::milliseconds pause = std::chrono::seconds{10});
  experience_file(experience_file const&) = delete;
  experience_file& operator=(experience_file const&) = delete;
  experience_file(experience_file&&) = delete;
  experience_file& operator=(experience_file&&) = delete;
  ~experience_file();

  /// What was left of that model, if it stands for the same.
  [[nodiscard]] std::optional<found> find(std::string const& model,
                                          std::string const& stands_for) const;

  /// Whether it is time to write again.
  [[nodiscard]] bool is_due(clock::time_point now) const;
  /// Of all models there are. Where the last time is not over yet this takes the place of what waits.
  void keep(std::vector<model_experience> all);
  /// Until that has been written.
  void finish();

 private:
  class writer;

  std::chrono::system_clock::time_point saved_at_;
  std::map<std::string, model_experience> left_;
  std::unique_ptr<writer> writer_;
};

}  // namespace sluice::server
