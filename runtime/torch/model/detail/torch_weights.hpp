/// The tensors of a TorchScript module, taken out of it, and back in as views of lent memory. Their bytes lie
/// in the model's file, and from there in an image (weights_image.hpp), which is made whenever there is time,
/// at the latest by `bind`. Includes torch; only for the files that torch_model.hpp hides.
///
///   torch_weights weights{structure, file, at::kCPU};   // its module is now empty
///   weights.bind(memory);     // … and computes out of `memory`, an address a piece
///   weights.undo_changes();   // after every run
///   weights.unbind();
///
/// States: empty → bound → empty. Not thread-safe.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <vector>

#include "runtime/server/hosting/model_file.hpp"
#include "runtime/torch/model/torch_file.hpp"
#include "runtime/torch/model/weights_image.hpp"

namespace sluice::server::detail {

class torch_weights {
 public:
  /// Takes every dense tensor found in the module's attributes, at any depth. It has been read for the CPU, from
  /// `file`.
  torch_weights(torch_structure const& from, std::shared_ptr<model_file const> file,
                at::Device device);
  torch_weights(torch_weights const&) = delete;
  torch_weights& operator=(torch_weights const&) = delete;
  torch_weights(torch_weights&&) = delete;
  torch_weights& operator=(torch_weights&&) = delete;
  ~torch_weights();

  /// Whether every storage that has not been read is here. If not, something else needs what it holds, and the
  /// module has to be read whole.
  [[nodiscard]] bool holds_all_unread() const noexcept { return holds_all_unread_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return image_->bytes(); }
  /// The storages' sizes in bytes, each of which needs contiguous memory.
  [[nodiscard]] std::span<std::uint64_t const> pieces() const noexcept { return pieces_; }
  /// Bytes of attributes that stay outside: quantised and sparse tensors.
  [[nodiscard]] std::uint64_t outside_bytes() const noexcept { return outside_bytes_; }
  [[nodiscard]] weights_image& image() noexcept { return *image_; }
  [[nodiscard]] weights_image const& image() const noexcept { return *image_; }

  /// Completes the image, copies it to `memory`, an address for each of `pieces()`, and points the module's
  /// tensors there. If it is `called_off` meanwhile it throws `cancelled` soon, and `unbind` is to be called.
  void bind(std::span<std::byte* const> memory, std::stop_token const& called_off = {});
  /// The same of memory that holds the image already.
  void attach(std::span<std::byte* const> memory);
  /// Puts back what a run assigned or changed in place.
  void undo_changes();
  /// Takes the tensors away from the memory. Throws `internal` if something else still refers to
  /// it.
  void unbind();

 private:
  struct region {              // one storage of the file
    std::uint64_t offset = 0;  // in the image
    std::uint64_t bytes = 0;
  };
  struct weight {
    at::Tensor tensor;  // the very tensor that the module holds
    std::size_t region;
    std::int64_t storage_offset;
    std::vector<std::int64_t> sizes, strides;
    std::uint32_t version;  // of the tensor as it was bound
  };
  struct attributes {  // of one object in the module: what `forward` may assign to
    c10::intrusive_ptr<c10::ivalue::Object> object;
    std::vector<c10::IValue> original;
  };
  class collector;

  void lay_out(std::vector<c10::Storage> const& storages, torch_structure const& from,
               std::shared_ptr<model_file const> file);
  void point_all();
  void empty_tensors();
  void copy_image(std::stop_token const& called_off) const;
  void point_at_memory(weight& which, at::Tensor const& region_bytes) const;

  at::Device device_;
  std::vector<region> regions_;
  std::vector<std::uint64_t> pieces_;  // sizes of the regions
  std::vector<std::size_t> in_image_;  // the regions as they follow each other in the image
  std::vector<weight> weights_;
  std::vector<attributes> attributes_;
  bool holds_all_unread_ = true;
  std::uint64_t outside_bytes_ = 0;
  std::optional<weights_image> image_;
  std::vector<std::byte*> memory_;  // of each region, while bound
  std::vector<at::Tensor> bound_;   // one view of the memory for each region, while bound
  /// Counts storages over lent memory that something still refers to. Shared with their deleters,
  /// which may outlive us.
  std::shared_ptr<std::atomic<int>> views_ = std::make_shared<std::atomic<int>>(0);
};

/// Constants in the code of a module that hold tensors, in bytes. For a GPU they are moved there,
/// and the device names that tracing wrote into the code follow, because a module that was traced
/// on a CPU makes its temporaries "on cpu".
std::uint64_t place_constants(torch::jit::Module const& module, at::Device device);

/// Waits until the calling thread's current stream of a GPU is idle; nothing to do for the CPU.
void wait_for(at::Device device);

}  // namespace sluice::server::detail
