/// What a step remembers of its troubles, to explain later ones.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

namespace sluice::detail {

/// Says on standard error when memory goes so often that training gets nowhere: it computes all the
/// time, and nothing looks wrong.
class tries_in_vain {
 public:
  /// A micro-batch of so many samples has lost its memory, after so many that have counted in all.
  void discarded(std::int64_t commits, std::int64_t samples);

 private:
  /// In a row; then twice as many, until one counts.
  static constexpr std::int64_t worth_a_word = 32;

  std::int64_t commits_ = 0;
  std::int64_t count_ = 0;
  std::int64_t reported_at_ = worth_a_word;
};

/// What a rehearsal has failed with. Training goes on, since what it minds may be its size; but a
/// failure that follows, before anything has been committed, may have its cause there.
class failed_rehearsal {
 public:
  void remember(std::exception_ptr const& why, std::int64_t samples);
  void forget() { what_.reset(); }
  /// A sentence for a failure of this text; none if there is nothing else to say.
  [[nodiscard]] std::optional<std::string> beside(std::string const& text) const;

 private:
  std::optional<std::string> what_;
  std::int64_t samples_ = 0;
};

}  // namespace sluice::detail
