#include "runtime/server/grpc/typed_contents.hpp"

#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <string>

#include "memhandover/base/error.hpp"
#include "runtime/server/grpc/inference.pb.h"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

using contents_message = inference::InferTensorContents;

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw error{error_kind::invalid_argument, fmt::format(format, std::forward<Args>(args)...)};
}

/// The one list that has elements; empty: none has.
std::string_view list_in(contents_message const& contents, std::string_view label) {
  std::string_view found;
  auto const look = [&](auto const& list, std::string_view name) {
    if (list.empty()) return;
    if (!found.empty()) {
      refuse("the contents of {} have both {} and {}; give one of them", label, found, name);
    }
    found = name;
  };
  look(contents.bool_contents(), "bool_contents");
  look(contents.int_contents(), "int_contents");
  look(contents.int64_contents(), "int64_contents");
  look(contents.uint_contents(), "uint_contents");
  look(contents.uint64_contents(), "uint64_contents");
  look(contents.fp32_contents(), "fp32_contents");
  look(contents.fp64_contents(), "fp64_contents");
  look(contents.bytes_contents(), "bytes_contents");
  return found;
}

/// Empty: there is none for that type.
std::string_view list_for(datatype type) {
  switch (type) {
    case datatype::boolean:
      return "bool_contents";
    case datatype::int8:
    case datatype::int16:
    case datatype::int32:
      return "int_contents";
    case datatype::int64:
      return "int64_contents";
    case datatype::uint8:
    case datatype::uint16:
    case datatype::uint32:
      return "uint_contents";
    case datatype::uint64:
      return "uint64_contents";
    case datatype::fp32:
      return "fp32_contents";
    case datatype::fp64:
      return "fp64_contents";
    case datatype::bytes:
      return "bytes_contents";
    case datatype::fp16:
    case datatype::bf16:
      break;
  }
  return "";
}

template <typename Element, typename List>
tensor_bytes packed(List const& list, std::string_view label) {
  auto result = tensor_bytes::unwritten(static_cast<std::size_t>(list.size()) * sizeof(Element));
  auto* at = result.data();
  for (auto const value : list) {
    auto const element = static_cast<Element>(value);
    if constexpr (std::numeric_limits<Element>::is_integer) {
      if (static_cast<decltype(value)>(element) != value) {
        refuse("the contents of {} have {}, which is beyond {} … {}", label, value,
               std::numeric_limits<Element>::min(), std::numeric_limits<Element>::max());
      }
    }
    std::memcpy(at, &element, sizeof(Element));
    at += sizeof(Element);
  }
  return result;
}

tensor_bytes packed_texts(contents_message const& contents) {
  std::size_t size = 0;
  for (auto const& each : contents.bytes_contents()) size += sizeof(std::uint32_t) + each.size();
  auto result = tensor_bytes::unwritten(size);
  auto* at = result.data();
  for (auto const& each : contents.bytes_contents()) {
    auto const length = static_cast<std::uint32_t>(each.size());
    std::memcpy(at, &length, sizeof(length));
    if (!each.empty()) std::memcpy(at + sizeof(length), each.data(), each.size());
    at += sizeof(length) + each.size();
  }
  return result;
}

}  // namespace

tensor_bytes bytes_of_contents(contents_message const& contents, datatype type,
                               std::string_view label) {
  auto const wanted = list_for(type);
  if (wanted.empty()) {
    refuse("the contents of {} cannot have elements of {}; send them in raw_input_contents", label,
           datatype_name(type));
  }
  auto const found = list_in(contents, label);
  if (!found.empty() && found != wanted) {
    refuse("the contents of {} are in {}; elements of {} take {}", label, found,
           datatype_name(type), wanted);
  }
  switch (type) {
    case datatype::boolean:
      return packed<std::uint8_t>(contents.bool_contents(), label);
    case datatype::int8:
      return packed<std::int8_t>(contents.int_contents(), label);
    case datatype::int16:
      return packed<std::int16_t>(contents.int_contents(), label);
    case datatype::int32:
      return packed<std::int32_t>(contents.int_contents(), label);
    case datatype::int64:
      return packed<std::int64_t>(contents.int64_contents(), label);
    case datatype::uint8:
      return packed<std::uint8_t>(contents.uint_contents(), label);
    case datatype::uint16:
      return packed<std::uint16_t>(contents.uint_contents(), label);
    case datatype::uint32:
      return packed<std::uint32_t>(contents.uint_contents(), label);
    case datatype::uint64:
      return packed<std::uint64_t>(contents.uint64_contents(), label);
    case datatype::fp32:
      return packed<float>(contents.fp32_contents(), label);
    case datatype::fp64:
      return packed<double>(contents.fp64_contents(), label);
    case datatype::bytes:
      return packed_texts(contents);
    case datatype::fp16:
    case datatype::bf16:
      break;
  }
  return {};
}

}  // namespace sluice::server
