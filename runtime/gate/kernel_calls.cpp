/// Kernel launches: their parameters are copied where the call is left to the submitter.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>

#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/kernel_layouts.hpp"

using namespace sluice::gate;

namespace {

struct dimensions {
  unsigned x, y, z;
};

using plain_launch = CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  unsigned, unsigned, CUstream, void**, void**);
using cooperative_launch = CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned,
                                        unsigned, unsigned, unsigned, CUstream, void**);
using configured_launch = CUresult (*)(CUlaunchConfig const*, CUfunction, void**, void**);

/// A launch as it lies in a queue; behind it come addresses of parameters, then the parameters
/// themselves, or the one buffer of all of them.
struct alignas(std::max_align_t) kernel_launch {
  symbol which;
  bool in_one_buffer;
  CUfunction function;
  dimensions grid, block;
  unsigned shared_bytes;
  CUstream stream;
  unsigned attribute_count;
  std::array<CUlaunchAttribute, 8> attributes;
  std::size_t count;  ///< of parameters
  std::size_t bytes;  ///< of all parameters

  [[nodiscard]] void** addresses() noexcept { return reinterpret_cast<void**>(this + 1); }
  /// Aligned like the buffer that a kernel's parameters come from.
  [[nodiscard]] std::byte* values() noexcept {
    return reinterpret_cast<std::byte*>(this + 1) + bytes_of_addresses(count);
  }
  [[nodiscard]] static constexpr std::size_t bytes_of_addresses(std::size_t count) noexcept {
    constexpr std::size_t unit = alignof(std::max_align_t);
    return (count * sizeof(void*) + unit - 1) / unit * unit;
  }
};

CUresult launch_now(kernel_launch& of) {
  std::array<void*, 5> buffer{CU_LAUNCH_PARAM_BUFFER_POINTER, of.values(),
                              CU_LAUNCH_PARAM_BUFFER_SIZE, &of.bytes, CU_LAUNCH_PARAM_END};
  void** const parameters = of.count > 0 ? of.addresses() : nullptr;
  void** const extra = of.in_one_buffer ? buffer.data() : nullptr;
  auto const& [gx, gy, gz] = of.grid;
  auto const& [bx, by, bz] = of.block;
  switch (of.which) {
    case symbol::of_cuLaunchKernelEx:
    case symbol::of_cuLaunchKernelEx_ptsz: {
      CUlaunchConfig config{};
      config.gridDimX = gx;
      config.gridDimY = gy;
      config.gridDimZ = gz;
      config.blockDimX = bx;
      config.blockDimY = by;
      config.blockDimZ = bz;
      config.sharedMemBytes = of.shared_bytes;
      config.hStream = of.stream;
      config.attrs = of.attributes.data();
      config.numAttrs = of.attribute_count;
      return real<configured_launch>(of.which)(&config, of.function, parameters, extra);
    }
    case symbol::of_cuLaunchCooperativeKernel:
    case symbol::of_cuLaunchCooperativeKernel_ptsz:
      return real<cooperative_launch>(of.which)(of.function, gx, gy, gz, bx, by, bz,
                                                of.shared_bytes, of.stream, parameters);
    default:
      return real<plain_launch>(of.which)(of.function, gx, gy, gz, bx, by, bz, of.shared_bytes,
                                          of.stream, parameters, extra);
  }
}

/// Parameters as a caller hands them over: an address of each, or one buffer.
struct given_parameters {
  void** each = nullptr;
  std::byte const* buffer = nullptr;
  std::size_t bytes = 0;
};

/// The buffer that `extra` describes; nothing if it is not described in the documented way.
std::optional<given_parameters> read_extra(void** extra) {
  given_parameters found;
  bool sized = false;
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      found.buffer = static_cast<std::byte const*>(extra[1]);
    } else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[1] != nullptr) {
      found.bytes = *static_cast<std::size_t const*>(extra[1]);
      sized = true;
    } else {
      return std::nullopt;
    }
  }
  return sized && found.buffer != nullptr ? std::optional{found} : std::nullopt;
}

/// Attributes whose values are all there is to them: no event is recorded, nothing is written back.
bool can_be_copied(CUlaunchAttribute const& one) {
  switch (one.id) {
    case CU_LAUNCH_ATTRIBUTE_IGNORE:
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
#if CUDA_VERSION >= 12080
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
#endif
      return true;
    default:
      return false;
  }
}

/// What the attribute adds to the form of a launch.
std::uint64_t form_of(CUlaunchAttribute const& one) {
  std::uint64_t value = 0;
  if (one.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
    value = key_of_work({one.value.clusterDim.x, one.value.clusterDim.y, one.value.clusterDim.z});
  } else if (one.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
    value = static_cast<std::uint64_t>(one.value.cooperative);
  }
  return key_of_work({static_cast<std::uint64_t>(one.id), value});
}

bool is_cooperative(symbol which) {
  return which == symbol::of_cuLaunchCooperativeKernel ||
         which == symbol::of_cuLaunchCooperativeKernel_ptsz;
}

/// One launch, on its way into the gate.
struct launch_request {
  symbol which;
  CUfunction function;
  dimensions grid, block;
  unsigned shared_bytes;
  stream_use stream;
  std::span<CUlaunchAttribute const> attributes;
  void** parameters;
  void** extra;

  [[nodiscard]] planned_work work() const {
    auto const part = [](auto value) { return static_cast<std::uint64_t>(value); };
    bool const bounded = the_gate().bounded();
    return {stream,
            bounded ? key_of_work({work_part(function), part(grid.x), part(grid.y), part(grid.z),
                                   part(block.x), part(block.y), part(block.z), part(shared_bytes)})
                    : 0,
            {which, function, 0}};
  }

  /// The driver accepts a plain launch whatever its grid, within the limits that all devices have;
  /// the others depend on it.
  [[nodiscard]] kind_of_call kind() const {
    constexpr unsigned most_y_and_z = 65535;
    constexpr unsigned most_x = 0x7fffffff;
    bool const plain = attributes.empty() && !is_cooperative(which);
    bool const usual = grid.x > 0 && grid.x <= most_x && grid.y > 0 && grid.y <= most_y_and_z &&
                       grid.z > 0 && grid.z <= most_y_and_z;
    std::uint64_t form =
        key_of_work({static_cast<std::uint64_t>(which), work_part(function), block.x, block.y,
                     block.z, shared_bytes, static_cast<std::uint64_t>(extra != nullptr)});
    if (!plain || !usual) {
      form = key_of_work({form, grid.x, grid.y, grid.z});
    }
    for (CUlaunchAttribute const& one : attributes) {
      form = key_of_work({form, form_of(one)});
    }
    return form;
  }

  [[nodiscard]] bool defer(submission_queue& queue, thread_slot const& self,
                           planned_work const& work, kind_of_call kind) const {
    constexpr std::size_t most_attributes = std::tuple_size_v<decltype(kernel_launch::attributes)>;
    if (attributes.size() > most_attributes ||
        !std::all_of(attributes.begin(), attributes.end(), can_be_copied)) {
      return false;
    }
    if (extra != nullptr) {
      std::optional<given_parameters> const given =
          parameters == nullptr ? read_extra(extra) : std::nullopt;
      return given && push(queue, self, work, kind, *given, nullptr);
    }
    static kernel_layout const none;
    if (parameters == nullptr) {
      return push(queue, self, work, kind, {}, &none);
    }
    std::shared_ptr<kernel_layout const> const layout = layout_of(function);
    return layout->known &&
           push(queue, self, work, kind, {parameters, nullptr, layout->bytes}, layout.get());
  }

 private:
  [[nodiscard]] bool push(submission_queue& queue, thread_slot const& self,
                          planned_work const& work, kind_of_call kind,
                          given_parameters const& given, kernel_layout const* layout) const {
    std::size_t const count = layout != nullptr ? layout->parameters.size() : 0;
    std::size_t const bytes =
        sizeof(kernel_launch) + kernel_launch::bytes_of_addresses(count) + given.bytes;
    return queue.push(
        self, work, kind, bytes,
        [](std::byte* at) { return launch_now(*reinterpret_cast<kernel_launch*>(at)); },
        [&](std::byte* at) {
          auto& made = *new (at) kernel_launch{which,
                                               layout == nullptr,
                                               function,
                                               grid,
                                               block,
                                               shared_bytes,
                                               stream.handle,
                                               static_cast<unsigned>(attributes.size()),
                                               {},
                                               count,
                                               given.bytes};
          std::copy(attributes.begin(), attributes.end(), made.attributes.begin());
          if (layout == nullptr) {
            std::memcpy(made.values(), given.buffer, given.bytes);
            return;
          }
          for (std::size_t i = 0; i < count; ++i) {
            auto const [offset, length] = layout->parameters[i];
            std::memcpy(made.values() + offset, given.each[i], length);
            made.addresses()[i] = made.values() + offset;
          }
        });
  }
};

template <typename Submit>
CUresult launch(launch_request const& wanted, Submit const& submit) {
  planned_work const work = wanted.work();
  kind_of_call const kind = the_gate().deferring() ? wanted.kind() : any_kind;
  return dispatch_or_defer(gated_call{wanted.which, work, true}, kind, submit,
                           [&](submission_queue& queue, thread_slot const& self) {
                             return wanted.defer(queue, self, work, kind);
                           });
}

CUresult launch_configured(symbol which, bool per_thread, CUlaunchConfig const* config,
                           CUfunction function, void** parameters, void** extra) {
  auto const submit = [&] {
    return real<configured_launch>(which)(config, function, parameters, extra);
  };
  if (config == nullptr) {
    return dispatch(gated_call{which, {{nullptr, per_thread}, 0, {which}}, true}, submit);
  }
  std::span<CUlaunchAttribute const> const attributes{
      config->attrs, config->attrs != nullptr ? config->numAttrs : 0};
  return launch({which,
                 function,
                 {config->gridDimX, config->gridDimY, config->gridDimZ},
                 {config->blockDimX, config->blockDimY, config->blockDimZ},
                 config->sharedMemBytes,
                 {config->hStream, per_thread},
                 attributes,
                 parameters,
                 extra},
                submit);
}

}  // namespace

#define SLUICE_LAUNCHES(suffix, per_thread)                                                        \
  SLUICE_DRIVER_CALL CUresult cuLaunchKernel##suffix(                                              \
      CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,  \
      unsigned shared, CUstream stream, void** parameters, void** extra) {                         \
    return launch({symbol::of_cuLaunchKernel##suffix,                                              \
                   f,                                                                              \
                   {gx, gy, gz},                                                                   \
                   {bx, by, bz},                                                                   \
                   shared,                                                                         \
                   {stream, per_thread},                                                           \
                   {},                                                                             \
                   parameters,                                                                     \
                   extra},                                                                         \
                  [&] {                                                                            \
                    return real<plain_launch>(symbol::of_cuLaunchKernel##suffix)(                  \
                        f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);             \
                  });                                                                              \
  }                                                                                                \
  SLUICE_DRIVER_CALL CUresult cuLaunchCooperativeKernel##suffix(                                   \
      CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,  \
      unsigned shared, CUstream stream, void** parameters) {                                       \
    return launch({symbol::of_cuLaunchCooperativeKernel##suffix,                                   \
                   f,                                                                              \
                   {gx, gy, gz},                                                                   \
                   {bx, by, bz},                                                                   \
                   shared,                                                                         \
                   {stream, per_thread},                                                           \
                   {},                                                                             \
                   parameters,                                                                     \
                   nullptr},                                                                       \
                  [&] {                                                                            \
                    return real<cooperative_launch>(symbol::of_cuLaunchCooperativeKernel##suffix)( \
                        f, gx, gy, gz, bx, by, bz, shared, stream, parameters);                    \
                  });                                                                              \
  }                                                                                                \
  SLUICE_DRIVER_CALL CUresult cuLaunchKernelEx##suffix(CUlaunchConfig const* config, CUfunction f, \
                                                       void** parameters, void** extra) {          \
    return launch_configured(symbol::of_cuLaunchKernelEx##suffix, per_thread, config, f,           \
                             parameters, extra);                                                   \
  }

SLUICE_LAUNCHES(, false)
SLUICE_LAUNCHES(_ptsz, true)
