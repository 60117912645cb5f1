#include "memhandover/base/standard_streams.hpp"
#include "runtime/cli/arguments.hpp"

int main(int argc, char** argv) {
  sluice::memhandover::occupy_standard_streams();
  return sluice::cli::run_command_line({argv + (argc > 0 ? 1 : 0), argv + argc});
}
