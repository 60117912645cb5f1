#include "runtime/cli/arguments.hpp"

int main(int argc, char** argv) {
  return sluice::cli::run_command_line({argv + (argc > 0 ? 1 : 0), argv + argc});
}
