#pragma once

/// What is used of libtorch that its documentation does not promise, all of it there in torch 2.11 to 2.15. The compiler finds out
/// whether another version has it, so that nothing here can be missing at run time; the last column is what would have to go.
///
///   torch::cuda::CUDAPluggableAllocator, at::cuda::MemPool,              step/cuda_arena.cpp,      training on a GPU in the pool,
///   at::cuda::clearCublasWorkspaces, c10::cuda::CUDACachingAllocator     model/cuda_recorder.cpp   and recorded launches of models
///   c10::SetCPUAllocator with a priority                                 host_allocator.cpp,       training on the host in the pool,
///                                                                        model/activations.cpp     and activations
///   at::getDeviceAllocator, its emptyCache and statistics                model/activations.cpp …   activations on a GPU given back
///   c10::impl::VirtualGuardImpl                                          step/random_state.cpp     dropout on a GPU
///   at::_cudnn_init_dropout_state, at::AutoDispatchBelowADInplaceOrView  step/dropout_states.cpp   dropout of recurrent layers there
///   c10::AutogradState::set_multithreading_enabled                       step/micro_batch.cpp      one device's backward on its thread
///   at::_foreach_copy_, _foreach_add_, _foreach_div_                     step/gradients.cpp …      (a loop over the tensors would do)
///   caffe2::serialize::ReadAdapterInterface, PyTorchStreamReader;        model/torch_file.cpp      models read without their weights
///   that it reads a record straight into its storage's memory                                      (reading all of each would do)
///   torch::jit::Node, Block, tryToGraphFunction                          detail/torch_weights.cpp  models with tensors as constants
///   torch::jit::AliasDb, Inline, ConstantPropagation, PeepholeOptimize   detail/code_effects.cpp   instances, and recorded launches
///   c10d::TCPStore, compareSet and multiGet                              store.cpp                 ranks on several hosts
///
/// What Python uses is in _torch_compat.py, which asks at run time.

#include <c10/macros/Export.h>

// Of <ATen/cuda/CUDAContextLight.h>, which would bring the headers of all CUDA libraries: not every torch comes with what they need.
namespace at::cuda {
TORCH_CUDA_CPP_API void clearCublasWorkspaces();  // NOLINT(readability-identifier-naming): its name
}
