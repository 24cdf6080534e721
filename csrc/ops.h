// What the torch face shares: checks that raise readable errors, and the call of a launcher on the
// device and stream of its tensors. Only ops.h and ops*.cpp include torch.
//
// It speaks torch's stable ABI, so one build runs on every torch from the target version up, with
// or without CUDA: the one symbol that only a CUDA torch has is declared weak.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <climits>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#include "launchers.h"

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace kdtree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws, as Python's RuntimeError, a message that says what is wrong and what is wanted.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string text(torch::headeronly::IntHeaderOnlyArrayRef shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

inline DType dtype_of(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      break;
  }
  std::ostringstream message;
  message << name << " has dtype " << t.scalar_type() << ", wants Float or BFloat16";
  throw std::runtime_error(message.str());
}

inline int extent(const char* name, int64_t n) {
  require(n <= INT_MAX, name, " has extent ", n, ", which does not fit an int");
  return static_cast<int>(n);
}

inline void check_dim(const char* name, const Tensor& t, int64_t dim) {
  require(t.dim() == dim, name, " has shape ", text(t.sizes()), ", wants ", dim, " dimensions");
}

inline void check_device(const char* name, const Tensor& t, const Tensor& like) {
  require(t.device() == like.device(), name, " is on another device than its peers");
}

// Checks everything a launcher takes for granted about one contiguous tensor.
inline void check(const char* name, const Tensor& t, std::initializer_list<int64_t> shape,
                  ScalarType dtype, const Tensor& like) {
  const torch::headeronly::IntHeaderOnlyArrayRef wants(shape.begin(), shape.size());
  require(t.sizes() == wants, name, " has shape ", text(t.sizes()), ", wants ", text(wants));
  require(t.scalar_type() == dtype, name, " has dtype ", t.scalar_type(), ", wants ", dtype);
  check_device(name, t, like);
  require(t.is_contiguous(), name, " must be contiguous");
}

// Checks a matrix whose rows may be strided but whose features are contiguous.
inline void check_rows(const char* name, const Tensor& t) {
  check_dim(name, t, 2);
  require(t.size(1) <= 1 || t.stride(1) == 1, name, " must have contiguous rows");
}

// The data of t as T, or null where t is absent. Tensors of the wrong dtype must be refused before.
template <class T = void>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T = void>
const T* data(const std::optional<Tensor>& t) {
  return t ? data<T>(*t) : nullptr;
}
template <class T = void>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(
      like, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

// Runs Launch on the device and the current stream of t.
template <auto Launch, class Params>
void run_on(const Tensor& t, const Params& p) {
  if (!t.is_cuda()) return Launch(p, nullptr);
  const torch::stable::accelerator::DeviceGuard guard(t.get_device_index());
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == 0,
          "no current CUDA stream");
  Launch(p, static_cast<Stream>(stream));
}

}  // namespace kdtree
