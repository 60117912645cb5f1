/// Log lines of the files that include torch. torch brings a copy of fmt that spdlog must not meet
/// in one file.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::server {

/// A model's code and structure have been read. `outside`: bytes of its weights that will not lie in the pool.
void log_prepared(std::string const& model, std::uint64_t bytes, std::uint64_t outside);
/// Its image is complete. `pinned`: whether it can be copied at full speed.
void log_image(std::string const& model, std::uint64_t bytes, bool pinned);

/// Its inputs' names say nothing of the arguments that they fill: they are taken in the order of the configuration.
void log_order_of_inputs(std::string const& model);
/// Its computations are not run beside each other, nor recorded, although its configuration asks for that.
void log_computed_alone(std::string const& model, std::string const& why);
/// For the first shape.
void log_recorded(std::string const& model);
/// Not recorded, for another reason.
void log_not_recorded(std::string const& model, std::string const& why);
/// What it computes contradicts its configuration.
void log_misconfigured(std::string const& model, std::string const& how);

}  // namespace sluice::server
