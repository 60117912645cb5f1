/// Models for an executor of tests: one that answers, and one that does to its process what it is asked to.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/runtime/server_model/sum_model.hpp"

namespace sluice::server::testing {

/// Its input is a number: what becomes of the process that computes it. Any other is answered.
enum class mischief : std::int64_t {
  none = 0,
  abort = 1,
  hang = 2,
  exit = 3,
  raise = 4,
  large = 5,
  end_without_a_word = 6,
  take_time = 7,  ///< 200 ms, and answer
  hang_in_the_first_process = 101,
  break_device = 102
};

inline constexpr std::chrono::milliseconds time_taken{200};
inline constexpr std::size_t large_answer = std::size_t{1} << 20U;
inline constexpr int exit_code_of_mischief = 42;

class rogue_model final : public hosted_model {
 public:
  explicit rogue_model(bool is_in_the_first_process)
      : is_in_the_first_process_(is_in_the_first_process) {}

  [[nodiscard]] bool device_works() const noexcept override { return device_works_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept override { return 0; }
  [[nodiscard]] std::span<std::uint64_t const> pieces() const noexcept override { return {}; }
  void load(std::span<std::byte* const> /*memory*/) override {}
  void unload() override {}
  [[nodiscard]] bool can_batch() const noexcept override { return true; }
  [[nodiscard]] std::vector<tensor> run(std::vector<tensor>& inputs,
                                        std::vector<std::string> const& /*wanted*/) override {
    switch (auto const wanted = number_in(inputs.at(0)); mischief{wanted}) {
      case mischief::abort:
        std::abort();
      case mischief::hang_in_the_first_process:
        if (!is_in_the_first_process_) {
          return {number("same", wanted)};
        }
        [[fallthrough]];
      case mischief::hang:
        for (;;) {
          ::pause();
        }
      case mischief::take_time:
        std::this_thread::sleep_for(time_taken);
        return {number("same", wanted)};
      case mischief::exit:
        std::exit(exit_code_of_mischief);
      case mischief::end_without_a_word:
        std::_Exit(exit_code_of_mischief);
      case mischief::break_device:
        device_works_ = false;
        throw error{error_kind::model_error, "a kernel has failed"};
      case mischief::raise:
        throw error{error_kind::invalid_argument, std::string(100'000, 'x')};
      case mischief::large:
        return {{"all",
                 datatype::uint8,
                 {large_answer},
                 std::vector<std::byte>(large_answer, std::byte{7})}};
      default:
        return {number("same", wanted)};
    }
  }

 private:
  bool is_in_the_first_process_;
  std::atomic<bool> device_works_{true};
};

}  // namespace sluice::server::testing
