/// Failures whose cause may lie in the pool, told with what the pool knows: who holds the memory,
/// or where to ask.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "runtime/torch/step/detail/engine.hpp"

namespace sluice::detail {
namespace {

bool says(c10::Error const& why, char const* words) {
  return std::string{why.what_without_backtrace()}.find(words) != std::string::npos;
}

/// What CUDA says of an access to an address without memory.
bool is_fault(c10::Error const& why) {
  return says(why, "illegal memory access") || says(why, "unspecified launch failure");
}

std::string about_fault(std::int64_t discards) {
  char const* const folder = std::getenv("SLUICE_RUNTIME_DIR");
  return "sluice: " + std::to_string(discards) +
         " micro-batches of this process have lost their memory to the inference server; where the "
         "kernel log (Xid 31) or compute-sanitizer names the address, this tells what lay there "
         "and "
         "who got it: sluice pool show" +
         (folder == nullptr ? std::string{} : " --runtime-dir '" + std::string{folder} + "'") +
         " --pid " + std::to_string(::getpid()) + " --address 0x…";
}

std::string text_of(std::exception_ptr const& why) {
  try {
    std::rethrow_exception(why);
  } catch (c10::Error const& error) {
    return error.what_without_backtrace();
  } catch (std::exception const& error) {
    return error.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

}  // namespace

void tries_in_vain::discarded(std::int64_t commits, std::int64_t samples) {
  if (commits != commits_) {
    *this = {};
    commits_ = commits;
  }
  if (++count_ < reported_at_) {
    return;
  }
  reported_at_ *= 2;
  auto const sentence =
      "sluice: the last " + std::to_string(count_) + " micro-batches of up to " +
      std::to_string(samples) +
      " samples have lost their memory before they were done, so that training gets nowhere. What "
      "would help: a smaller micro_batch, which takes less time; models that stay warm for longer "
      "(warm.min_idle, warm.max_idle of the policy); a larger pool\n";
  static_cast<void>(std::fputs(sentence.c_str(), stderr));
}

void failed_rehearsal::remember(std::exception_ptr const& why, std::int64_t samples) {
  what_ = text_of(why);
  samples_ = samples;
}

std::optional<std::string> failed_rehearsal::beside(std::string const& text) const {
  if (!what_ || *what_ == text) {
    return std::nullopt;
  }
  return "sluice's rehearsal with " + std::to_string(samples_) +
         " samples had failed before: " + *what_;
}

void engine::explain(c10::Error& why) const {
  if (runtime_ == nullptr || says(why, "sluice:")) {
    return;
  }
  if (dynamic_cast<c10::OutOfMemoryError const*>(&why) != nullptr) {
    why.add_context(runtime_->shortage_text());
    return;
  }
  if (auto const rehearsal = failed_rehearsal_.beside(why.what_without_backtrace())) {
    why.add_context(*rehearsal);
  }
  if (counts_.discards > 0 && is_fault(why)) {
    why.add_context(about_fault(counts_.discards));
  }
}

}  // namespace sluice::detail
