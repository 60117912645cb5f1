#include "runtime/torch/model/torch_file.hpp"

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace sluice::server {
namespace {

using caffe2::serialize::PyTorchStreamReader;

/// A local header of a zip archive (APPNOTE.TXT 4.3.7): the method of compression stands in it, 0 for none.
constexpr std::uint64_t method_offset = 8;

std::span<std::byte> as_bytes(void* buffer, std::size_t bytes) {
  return {static_cast<std::byte*>(buffer), bytes};
}

/// Reads the file for torch, all of it.
class whole_file : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit whole_file(std::shared_ptr<model_file const> file) : file_(std::move(file)) {}

  [[nodiscard]] std::size_t size() const override { return file_->bytes(); }

  std::size_t read(std::uint64_t offset, void* to, std::size_t bytes,
                   char const* /*what*/) const override {
    auto const there = bytes_from(offset, bytes);
    file_->read(offset, as_bytes(to, there));
    return there;
  }

 protected:
  [[nodiscard]] std::size_t bytes_from(std::uint64_t offset, std::size_t bytes) const {
    return std::min<std::uint64_t>(bytes, file_->bytes() - std::min(offset, file_->bytes()));
  }

  std::shared_ptr<model_file const> const file_;
};

/// The same but for these records, by their offset in the file.
using records = std::unordered_map<std::uint64_t, std::uint64_t>;

class file_without : public whole_file {
 public:
  file_without(std::shared_ptr<model_file const> file, records left_out)
      : whole_file(std::move(file)), left_out_(std::move(left_out)) {}

  std::size_t read(std::uint64_t offset, void* to, std::size_t bytes,
                   char const* what) const override {
    auto const found = left_out_.find(offset);
    if (found == left_out_.end() || found->second != bytes) {
      return whole_file::read(offset, to, bytes, what);
    }
    is_ambiguous_ = !unread_.try_emplace(to, file_range{offset, bytes}).second || is_ambiguous_;
    return bytes;
  }

  [[nodiscard]] std::unordered_map<void const*, file_range> const& unread() const {
    return unread_;
  }
  /// Whether memory came by a second time: what was read first has been dropped.
  [[nodiscard]] bool is_ambiguous() const { return is_ambiguous_; }

 private:
  records const left_out_;
  mutable std::unordered_map<void const*, file_range> unread_;
  mutable bool is_ambiguous_ = false;
};

bool is_compressed(model_file const& file, std::uint64_t header) {
  std::array<std::byte, 2> method{};
  file.read(header + method_offset, method);
  return method != std::array<std::byte, 2>{};
}

/// The storages of attributes that lie in the file as they do in memory.
records weights_in(model_file const& file, PyTorchStreamReader& reader) {
  constexpr std::string_view folder = "data/";
  records found;
  for (auto const& name : reader.getAllRecords()) {
    if (name.starts_with(folder) && !is_compressed(file, reader.getRecordHeaderOffset(name))) {
      auto const offset = reader.getRecordOffset(name);
      auto const bytes = reader.getRecordSize(name);
      if (bytes > 0 && offset + bytes <= file.bytes()) {
        found.emplace(offset, bytes);
      }
    }
  }
  return found;
}

/// What `__setstate__` makes of tensors while they are read, nobody could make good afterwards; and of such that have
/// not been read it may make anything.
bool has_code_to_run(PyTorchStreamReader& reader) {
  constexpr std::string_view folder = "code/";
  auto const names = reader.getAllRecords();
  return std::any_of(names.begin(), names.end(), [&](std::string const& name) {
    if (!name.starts_with(folder)) {
      return false;
    }
    auto const [data, bytes] = reader.getRecord(name);
    return std::string_view{static_cast<char const*>(data.get()), bytes}.find("__setstate__") !=
           std::string_view::npos;
  });
}

/// As above, of what has been read.
bool runs_code_when_read(torch::jit::Module const& module) {
  auto const functions = module._ivalue()->compilation_unit()->get_functions();
  return std::any_of(functions.begin(), functions.end(), [](torch::jit::Function const* each) {
    return each->name() == "__setstate__";
  });
}

/// What was pickled, by the first words of it.
std::string pickled(std::string_view pickle) {
  constexpr std::size_t head = 2;  // the protocol's version
  constexpr std::string_view ordered{"ccollections\nOrderedDict\n"};
  auto const words = pickle.substr(std::min(head, pickle.size()));
  if (words.starts_with(ordered)) {
    return "a state dict, the weights of a model without its code, as torch.save writes it";
  }
  if (words.starts_with('}')) {
    return "a pickled dictionary, such as a state dict or a checkpoint, as torch.save writes it";
  }
  auto const middle = words.find('\n');
  auto const end = middle == std::string_view::npos ? middle : words.find('\n', middle + 1);
  if (words.starts_with('c') && end != std::string_view::npos) {
    return "a pickled object of the Python class " + std::string{words.substr(1, middle - 1)} +
           '.' + std::string{words.substr(middle + 1, end - middle - 1)} +
           ", as torch.save writes it";
  }
  return "a pickled object, as torch.save writes it";
}

/// In a zip archive.
std::optional<std::string> other_archive(std::shared_ptr<model_file const> const& file) {
  PyTorchStreamReader content{std::make_shared<whole_file>(file)};
  if (content.hasRecord("constants.pkl")) {
    return std::nullopt;
  }
  if (content.hasRecord("data.pkl")) {
    auto const [data, bytes] = content.getRecord("data.pkl");
    return pickled({static_cast<char const*>(data.get()), bytes});
  }
  if (content.hasRecord("archive_format")) {
    return "a program of torch.export";
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> other_format(std::shared_ptr<model_file const> const& file) {
  std::array<char, 2> head{};
  if (file->bytes() < head.size()) {
    return std::nullopt;
  }
  file->read(0, std::as_writable_bytes(std::span{head}));
  constexpr char pickle_protocol = '\x80';
  if (head[0] == pickle_protocol && head[1] >= 2 && head[1] <= 5) {
    return "a Python pickle, as torch.save wrote it before PyTorch 1.6";
  }
  try {
    return other_archive(file);
  } catch (std::exception const&) {  // reading it says why
    return std::nullopt;
  }
}

std::optional<torch_structure> read_structure(std::shared_ptr<model_file const> const& file) {
  try {
    PyTorchStreamReader content{std::make_shared<whole_file>(file)};
    if (has_code_to_run(content)) {
      return std::nullopt;
    }
    auto const reader = std::make_shared<file_without>(file, weights_in(*file, content));
    auto module = torch::jit::load(reader, at::kCPU);
    if (reader->is_ambiguous() || runs_code_when_read(module)) {
      return std::nullopt;
    }
    return torch_structure{std::move(module), reader->unread()};
  } catch (std::exception const&) {
    return std::nullopt;
  }
}

torch::jit::Module read_whole(std::shared_ptr<model_file const> const& file) {
  return torch::jit::load(std::make_shared<whole_file>(file), at::kCPU);
}

}  // namespace sluice::server
